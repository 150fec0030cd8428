/* Packing weights into panels, and reading rows back. See formats.h for the layout.
 *
 * Notable here:
 * - a block of ggml's becomes codes without a sign plus its scales as they are: nothing is rounded
 * - codes move four at a time: byte-wise shifts and masks of 32-bit words
 * - `pippin_rows` computes in float32 in ggml's order, so that its values equal those of the file to the bit
 */
#include <atomic>
#include <cstring>

#include "formats.h"
#include "library.h"
#include "matmul.h"
#include "simd.h"
#include "threads.h"

namespace pippin {
namespace {

using pippin_generic::bits_to_float;
using pippin_generic::half_to_float;

constexpr int kRows = PIPPIN_PANEL;
constexpr int kMost = 256;  // inputs of the largest block

/* One row's block, whatever its format: codes >= 0, half-precision or float32 scale and minimum, 8-bit ones. */
struct Block {
    uint8_t codes[kMost];
    uint16_t scale, minimum;
    float wide_scale, wide_minimum;
    uint8_t scales[16], minima[8];
};

uint16_t half_at(const uint8_t *p) {
    uint16_t half;
    std::memcpy(&half, p, 2);
    return half;
}
float float_at(const uint8_t *p) {
    float value;
    std::memcpy(&value, p, 4);
    return value;
}
uint32_t word_at(const uint8_t *p) {
    uint32_t word;
    std::memcpy(&word, p, 4);
    return word;
}
void put_word(uint8_t *p, uint32_t word) { std::memcpy(p, &word, 4); }

/* --- one unit: 32 codes of 16 rows ------------------------------------------------------------------------------- */
/* Adds bits [from, from + width) of each code to the vectors at `target`; `codes` points to 16 rows of `stride`. */
void put_plane(const uint8_t *codes, int64_t stride, int from, int width, uint8_t *target) {
    const int each = 8 / width;  // quads of a vector
    const uint32_t mask = ((1u << width) - 1) * 0x01010101u;
    for (int row = 0; row < kRows; ++row) {
        const uint8_t *own = codes + row * stride;
        for (int first = 0; first < 8; first += each) {
            uint32_t word = 0;
            for (int i = 0; i < each; ++i) word |= ((word_at(own + 4 * (first + i)) >> from) & mask) << (width * i);
            put_word(target + 64 * (first / each) + 4 * row, word);
        }
    }
}
/* The reverse for one row, into 32 codes that are 0 in those bits. */
void get_plane(const uint8_t *source, int row, int from, int width, uint8_t *codes) {
    const int each = 8 / width;
    const uint32_t mask = ((1u << width) - 1) * 0x01010101u;
    for (int quad = 0; quad < 8; ++quad) {
        const uint32_t word = word_at(source + 64 * (quad / each) + 4 * row);
        const uint32_t bits = ((word >> (width * (quad % each))) & mask) << from;
        put_word(codes + 4 * quad, word_at(codes + 4 * quad) | bits);
    }
}
/* Bits of the first plane; the rest is the second. */
int low_bits(int bits) { return bits == 8 ? 8 : bits >= 4 ? 4 : 2; }

void put_unit(int bits, const uint8_t *codes, int64_t stride, uint8_t *target) {
    const int low = low_bits(bits);
    put_plane(codes, stride, 0, low, target);
    if (bits > low) put_plane(codes, stride, low, bits - low, target + 64 * low);
}
void get_unit(int bits, const uint8_t *source, int row, uint8_t *codes) {
    const int low = low_bits(bits);
    std::memset(codes, 0, 32);
    get_plane(source, row, 0, low, codes);
    if (bits > low) get_plane(source + 64 * low, row, low, bits - low, codes);
}

/* --- blocks of ggml ---------------------------------------------------------------------------------------------- */
void nibbles(const uint8_t *packed, int run, uint8_t *codes) {
    for (int i = 0; i < run; ++i) {
        codes[i] = packed[i] & 15;
        codes[run + i] = packed[i] >> 4;
    }
}
/* 32 weights: [scale][minimum][fifth bits][codes], where they are. */
void read_small(int format, const uint8_t *p, Block &block) {
    block.scale = half_at(p);
    if (format == PIPPIN_Q8_0) {
        for (int i = 0; i < 32; ++i) block.codes[i] = p[2 + i] ^ 128;  // + 128, of a signed byte
        return;
    }
    p += 2;
    if (format == PIPPIN_Q4_1 || format == PIPPIN_Q5_1) {
        block.minimum = half_at(p);
        p += 2;
    }
    uint32_t fifth = 0;
    if (format == PIPPIN_Q5_0 || format == PIPPIN_Q5_1) {
        fifth = p[0] | p[1] << 8 | p[2] << 16 | static_cast<uint32_t>(p[3]) << 24;
        p += 4;
    }
    nibbles(p, 16, block.codes);
    for (int i = 0; i < 32; ++i) block.codes[i] |= ((fifth >> i) & 1) << 4;
}
/* Q4_K, Q5_K: 8 scales and 8 minima of 6 bits in 12 bytes. */
void read_two_levels(bool five, const uint8_t *p, Block &block) {
    block.scale = half_at(p);
    block.minimum = half_at(p + 2);
    const uint8_t *a = p + 4, *b = p + 8, *c = p + 12;
    for (int i = 0; i < 4; ++i) {
        block.scales[i] = a[i] & 63;
        block.minima[i] = b[i] & 63;
        block.scales[4 + i] = (c[i] & 15) | ((a[i] >> 2) & 48);
        block.minima[4 + i] = (c[i] >> 4) | ((b[i] >> 2) & 48);
    }
    const uint8_t *fifth = p + 16, *low = five ? p + 48 : p + 16;
    for (int run = 0; run < 4; ++run) nibbles(low + 32 * run, 32, block.codes + 64 * run);
    for (int i = 0; five && i < 256; ++i) block.codes[i] |= ((fifth[i % 32] >> (i / 32)) & 1) << 4;
}
/* Q6_K: low 4 bits, high 2 bits, 16 signed scales, scale. */
void read_halves(const uint8_t *p, Block &block) {
    block.scale = half_at(p + 208);
    std::memcpy(block.scales, p + 192, 16);
    for (int half = 0; half < 2; ++half) {
        uint8_t *codes = block.codes + 128 * half;
        nibbles(p + 64 * half, 64, codes);
        for (int i = 0; i < 128; ++i) codes[i] |= ((p[128 + 32 * half + i % 32] >> (2 * (i / 32))) & 3) << 4;
    }
}
void read_block(int format, const uint8_t *p, Block &block) {
    if (format == PIPPIN_Q4_K || format == PIPPIN_Q5_K) return read_two_levels(format == PIPPIN_Q5_K, p, block);
    if (format == PIPPIN_Q6_K) return read_halves(p, block);
    read_small(format, p, block);
}

/* --- one block of a panel ---------------------------------------------------------------------------------------- */
void put_block(int format, const Format &f, int64_t inputs, const Block *blocks, uint8_t *target) {
    for (int row = 0; row < kRows; ++row) {
        if (is_affine(f)) {
            std::memcpy(target + 4 * row, &blocks[row].wide_scale, 4);
            std::memcpy(target + 64 + 4 * row, &blocks[row].wide_minimum, 4);
            continue;
        }
        std::memcpy(target + 2 * row, &blocks[row].scale, 2);
        if (f.block_head == 64) std::memcpy(target + 32 + 2 * row, &blocks[row].minimum, 2);
    }
    target += f.block_head;
    for (int unit = 0; unit < inputs / 32; ++unit, target += f.unit_head + code_bytes(f)) {
        for (int row = 0; f.unit_head != 0 && row < kRows; ++row) {
            const Block &block = blocks[row];
            target[row] = format == PIPPIN_Q6_K ? block.scales[2 * unit] : block.scales[unit];
            target[16 + row] = format == PIPPIN_Q6_K ? block.scales[2 * unit + 1] : block.minima[unit];
        }
        put_unit(f.bits, blocks[0].codes + 32 * unit, sizeof(Block), target + f.unit_head);
    }
}

/* The values of one row of a block, in ggml's order of roundings. */
void get_values(const pippin_matrix &weight, const Format &f, int64_t inputs, const uint8_t *source, int row,
                float *target) {
    const bool affine = is_affine(f);
    const float scale = affine ? float_at(source + 4 * row) : half_to_float(half_at(source + 2 * row));
    const float minimum = affine              ? float_at(source + 64 + 4 * row)
                          : f.block_head == 64 ? half_to_float(half_at(source + 32 + 2 * row))
                                               : 0.f;
    const float zero = is_ours(f) ? weight.zero : f.zero;
    source += f.block_head;
    for (int unit = 0; unit < inputs / 32; ++unit, source += f.unit_head + code_bytes(f), target += 32) {
        uint8_t codes[32];
        get_unit(f.bits, source + f.unit_head, row, codes);
        if (weight.format == PIPPIN_Q6_K) {
            const float low = scale * static_cast<int8_t>(source[row]);
            const float high = scale * static_cast<int8_t>(source[16 + row]);
            for (int i = 0; i < 32; ++i) target[i] = (i < 16 ? low : high) * (codes[i] - zero);
        } else if (f.unit_head != 0) {
            const float by = scale * source[row], less = minimum * source[16 + row];
            for (int i = 0; i < 32; ++i) target[i] = by * codes[i] - less;
        } else if (f.block_head >= 64) {
            for (int i = 0; i < 32; ++i) target[i] = codes[i] * scale + minimum;
        } else {
            for (int i = 0; i < 32; ++i) target[i] = (codes[i] - zero) * scale;
        }
    }
}

void get_row(const pippin_matrix &weight, const Format &f, int64_t id, float *target) {
    const uint8_t *panel = static_cast<const uint8_t *>(weight.data) +
                           id / kRows * panel_bytes(f, weight.group, weight.columns);
    const int row = static_cast<int>(id % kRows);
    if (f.bits == 32) {
        for (int64_t i = 0; i < weight.columns; ++i) std::memcpy(target + i, panel + 64 * i + 4 * row, 4);
    } else if (f.bits == 16) {
        for (int64_t i = 0; i < weight.columns; ++i) {
            const uint16_t half = half_at(panel + 64 * (i / 2) + 4 * row + 2 * (i % 2));
            target[i] = bits_to_float(static_cast<uint32_t>(half) << 16);
        }
    } else {
        const int64_t inputs = block_inputs(f, weight.group), bytes = block_bytes(f, weight.group);
        for (int64_t i = 0; i < weight.columns / inputs; ++i) {
            get_values(weight, f, inputs, panel + i * bytes, row, target + i * inputs);
        }
    }
}

/* --- checks ------------------------------------------------------------------------------------------------------ */
constexpr int64_t kLargest = int64_t(1) << 30;  // of rows, and of columns: the bytes of a matrix fit into 64 bits

int check_shape(int format, int group, int64_t rows, int64_t columns) {
    const Format f = format_of(format);
    if (f.name == nullptr) return fail(PIPPIN_BAD_ARGUMENT, "%d is not a weight format", format);
    if (rows < 1 || columns < 1 || rows > kLargest || columns > kLargest) {
        return fail(PIPPIN_BAD_ARGUMENT, "%lld rows and %lld columns: both must be 1 to 2^30", (long long)rows,
                    (long long)columns);
    }
    if (is_ours(f) && group != 32 && group != 64 && group != 128) {
        return fail(PIPPIN_BAD_ARGUMENT, "a group of %d for %s: it must be 32, 64 or 128", group, f.name);
    }
    if (columns % block_inputs(f, group) != 0) {
        return fail(PIPPIN_BAD_ARGUMENT, "%lld columns are no multiple of the %lld inputs that share a scale in %s",
                    (long long)columns, (long long)block_inputs(f, group), f.name);
    }
    return PIPPIN_OK;
}
int check_buffers(const void *source, const void *target) {
    if (source == nullptr || target == nullptr) return fail(PIPPIN_BAD_ARGUMENT, "the source or the target is NULL");
    if (reinterpret_cast<uintptr_t>(target) % 64 != 0) {
        return fail(PIPPIN_BAD_ARGUMENT, "the target does not begin at a multiple of 64 bytes");
    }
    return PIPPIN_OK;
}

/* body(panel, rows of it) on all threads. */
template <class F> void each_panel(int64_t rows, const F &body) {
    const int64_t panels = panel_count(rows);
    parallel(panels, chunk_of(panels, 4), [&](int64_t begin, int64_t end, int) {
        for (int64_t panel = begin; panel < end; ++panel) {
            const int64_t rest = rows - kRows * panel;
            body(panel, static_cast<int>(rest < kRows ? rest : kRows));
        }
    });
}

template <class T> void pack_dense(const T *source, int64_t stride, int64_t columns, int rows, int each, T *target) {
    const int64_t padded = (columns + each - 1) / each * each;  // inputs that lie together come in `each`
    for (int64_t i = 0; i < padded; ++i) {
        T *lane = target + i / each * (kRows * each) + i % each;
        for (int row = 0; row < kRows; ++row) {
            lane[row * each] = row < rows && i < columns ? source[row * stride + i] : T(0);
        }
    }
}

/* Codes of one byte, and what set(block, group) writes of their scales; `first` and `second` must not be NULL. */
template <class F>
int pack_groups(int format, int group, const uint8_t *codes, const void *first, const void *second, int64_t rows,
                int64_t columns, void *target, const F &set) {
    const Format f = format_of(format);
    if (const int bad = check_shape(format, group, rows, columns)) return bad;
    if (const int bad = check_buffers(codes, target)) return bad;
    if (first == nullptr || second == nullptr) return fail(PIPPIN_BAD_ARGUMENT, "the scales are NULL");
    const int64_t count = columns / group;
    std::atomic<int64_t> wrong{-1};  // a row with a code that is too large
    each_panel(rows, [&](int64_t panel, int present) {
        Block block[kRows];
        std::memset(block, 0, sizeof(block));
        uint8_t *out = static_cast<uint8_t *>(target) + panel * panel_bytes(f, group, columns);
        for (int64_t i = 0; i < count; ++i, out += block_bytes(f, group)) {
            for (int row = 0; row < present; ++row) {
                const int64_t index = panel * kRows + row;
                std::memcpy(block[row].codes, codes + index * columns + i * group, static_cast<size_t>(group));
                set(block[row], index * count + i);
                uint8_t used = 0;
                for (int j = 0; j < group; ++j) used |= block[row].codes[j];
                if (used >> f.bits != 0) wrong.store(index);
            }
            put_block(format, f, group, block, out);
        }
    });
    if (wrong.load() < 0) return PIPPIN_OK;
    return fail(PIPPIN_BAD_ARGUMENT, "row %lld has a code above %d, the largest of %s", (long long)wrong.load(),
                (1 << f.bits) - 1, f.name);
}

}  // namespace
}  // namespace pippin

using namespace pippin;

extern "C" int64_t pippin_packed_bytes(int format, int group, int64_t rows, int64_t columns) {
    const int bad = check_shape(format, group, rows, columns);
    return bad != PIPPIN_OK ? bad : panel_count(rows) * panel_bytes(format_of(format), group, columns);
}

extern "C" int pippin_pack_ggml(int format, const void *blocks, int64_t rows, int64_t columns, void *target) {
    const Format f = format_of(format);
    if (f.name != nullptr && f.ggml_bytes == 0) {
        return fail(PIPPIN_BAD_ARGUMENT, "%s is not a block format of ggml's", f.name);
    }
    if (const int bad = check_shape(format, 0, rows, columns)) return bad;
    if (const int bad = check_buffers(blocks, target)) return bad;
    const int64_t count = columns / f.block;
    const uint8_t *source = static_cast<const uint8_t *>(blocks);
    each_panel(rows, [&](int64_t panel, int present) {
        Block block[kRows];
        std::memset(block, 0, sizeof(block));
        uint8_t *out = static_cast<uint8_t *>(target) + panel * panel_bytes(f, 0, columns);
        for (int64_t i = 0; i < count; ++i, out += block_bytes(f, 0)) {
            for (int row = 0; row < present; ++row) {
                read_block(format, source + ((panel * kRows + row) * count + i) * f.ggml_bytes, block[row]);
            }
            put_block(format, f, f.block, block, out);
        }
    });
    return PIPPIN_OK;
}

extern "C" int pippin_pack_dense(int format, const void *source, int64_t row_stride, int64_t rows, int64_t columns,
                                 void *target) {
    const Format f = format_of(format);
    if (f.name != nullptr && !is_dense(f)) return fail(PIPPIN_BAD_ARGUMENT, "%s is not a dense format", f.name);
    if (const int bad = check_shape(format, 0, rows, columns)) return bad;
    if (const int bad = check_buffers(source, target)) return bad;
    if (rows > 1 && row_stride < columns) {
        return fail(PIPPIN_BAD_ARGUMENT, "a stride of %lld between rows of %lld", (long long)row_stride,
                    (long long)columns);
    }
    each_panel(rows, [&](int64_t panel, int present) {
        uint8_t *out = static_cast<uint8_t *>(target) + panel * panel_bytes(f, 0, columns);
        const int64_t start = panel * kRows * row_stride;
        if (f.bits == 32) {
            pack_dense(static_cast<const float *>(source) + start, row_stride, columns, present, 1,
                       reinterpret_cast<float *>(out));
        } else {
            pack_dense(static_cast<const uint16_t *>(source) + start, row_stride, columns, present, 2,
                       reinterpret_cast<uint16_t *>(out));
        }
    });
    return PIPPIN_OK;
}

extern "C" int pippin_pack_codes(int format, int group, const uint8_t *codes, const uint16_t *scales, int64_t rows,
                                 int64_t columns, void *target) {
    const Format f = format_of(format);
    if (f.name != nullptr && (!is_ours(f) || is_affine(f))) {
        return fail(PIPPIN_BAD_ARGUMENT, "%s is not a format of codes and scales", f.name);
    }
    return pack_groups(format, group, codes, scales, scales, rows, columns, target,
                       [=](Block &block, int64_t at) { block.scale = scales[at]; });
}

extern "C" int pippin_pack_affine(int format, int group, const uint8_t *codes, const float *scales, const float *minima,
                                  int64_t rows, int64_t columns, void *target) {
    const Format f = format_of(format);
    if (f.name != nullptr && !is_affine(f)) {
        return fail(PIPPIN_BAD_ARGUMENT, "%s is not a format of codes, scales and minima", f.name);
    }
    return pack_groups(format, group, codes, scales, minima, rows, columns, target, [=](Block &block, int64_t at) {
        block.wide_scale = scales[at];
        block.wide_minimum = minima[at];
    });
}

extern "C" int pippin_rows(const pippin_matrix *weight, const int64_t *ids, int64_t count, float *target) {
    if (weight == nullptr || weight->data == nullptr) return fail(PIPPIN_BAD_ARGUMENT, "the matrix has no data");
    if (const int bad = check_shape(weight->format, weight->group, weight->rows, weight->columns)) return bad;
    if (count < 0 || (count > 0 && (ids == nullptr || target == nullptr))) {
        return fail(PIPPIN_BAD_ARGUMENT, "%lld rows, or ids or target NULL", (long long)count);
    }
    for (int64_t i = 0; i < count; ++i) {
        if (ids[i] < 0 || ids[i] >= weight->rows) {
            return fail(PIPPIN_BAD_ARGUMENT, "row %lld of a matrix with %lld", (long long)ids[i],
                        (long long)weight->rows);
        }
    }
    const Format f = format_of(weight->format);
    parallel(count, 32768 / weight->columns + 1, [&](int64_t begin, int64_t end, int) {
        for (int64_t i = begin; i < end; ++i) get_row(*weight, f, ids[i], target + i * weight->columns);
    });
    return PIPPIN_OK;
}
