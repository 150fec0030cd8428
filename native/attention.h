/* Attention over a paged cache. Included by kernels.cpp for each instruction set.
 *
 * Notable here:
 * - a row is a query of one head; the rows of all heads that share keys, and of several tokens, go through the keys
 *   together, up to 12 in registers
 * - keys are read with 16 of them in the lanes, values with 16 dimensions in the lanes: nothing is ever transposed here
 * - a row's sums are formed in parts of 256 keys at absolute positions and merged in order: the result is the same to
 *   the bit however the rows and the parts are shared out
 * - keys that a row must not see are never multiplied by zero: what lies there may be anything, NaN too
 */
#ifndef PIPPIN_ATTENTION_H
#define PIPPIN_ATTENTION_H

#include "ops.h"
#include "recurrent.h"

namespace PIPPIN_NS {

using pippin::Cache;
using pippin::PART;
using pippin::Queries;
using pippin::SUBTILE;

#if defined(PIPPIN_ISA_AVX512BF16) || defined(PIPPIN_ISA_AVX512VNNI)
constexpr bool MANY_REGISTERS = true;
#else
constexpr bool MANY_REGISTERS = false;
#endif
/* Vectors of each row that are summed at once, so that all sums stay in registers. */
constexpr int side_by_side(int rows) {
    if (MANY_REGISTERS) return rows > 6 ? 2 : 4;
    return rows > 3 ? 1 : rows > 1 ? 2 : 4;
}

template <int KIND> constexpr int64_t SIZE = KIND == PIPPIN_CACHE_F32 ? 4 : KIND == PIPPIN_CACHE_BF16 ? 2 : 1;

constexpr int64_t AHEAD = 2; // blocks between the values that are read and those that are asked for
constexpr int64_t NEXT = 4;  // pointers after the last block, to what is read next

/* 16 elements of the cache as float32. */
template <int KIND> PIPPIN_INLINE f32x16 widen(const uint8_t *p) {
    if (KIND == PIPPIN_CACHE_F32) return f32x16::loadu(reinterpret_cast<const float *>(p));
    if (KIND == PIPPIN_CACHE_BF16) return f32x16::from_bf16(reinterpret_cast<const uint16_t *>(p));
    return f32x16::from_i8(reinterpret_cast<const int8_t *>(p));
}

/* The first `lanes` of them; nothing beyond is read. */
template <int KIND> PIPPIN_INLINE f32x16 widen_first(const uint8_t *p, int lanes) {
    uint8_t copy[16 * SIZE<KIND>] = {};
    memcpy(copy, p, static_cast<size_t>(lanes * SIZE<KIND>));
    return widen<KIND>(copy);
}

/* s[row][16 block + lane] = q[row] . key[lane of block], for q laid out as [dimension][ROWS]. `keys` goes on with what
 * is read after these blocks: few rows wait for memory, and ask for it in advance. */
template <int KIND, int ROWS, int BLOCKS>
static void score(const uint8_t *const *keys, int64_t head_dim, const float *q, float *s) {
    const uint8_t *base[BLOCKS];
    f32x16 sums[ROWS][BLOCKS];
#pragma GCC unroll 4
    for (int b = 0; b < BLOCKS; ++b) base[b] = keys[b];
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int b = 0; b < BLOCKS; ++b) sums[r][b] = f32x16::zero();
    for (int64_t d = 0; d < head_dim; ++d, q += ROWS) {
        f32x16 k[BLOCKS];
#pragma GCC unroll 4
        for (int b = 0; b < BLOCKS; ++b) k[b] = widen<KIND>(base[b] + d * 16 * SIZE<KIND>);
        if (ROWS < SUBTILE && d * 16 * SIZE<KIND> % 64 == 0)
#pragma GCC unroll 4
            for (int b = 0; b < BLOCKS; ++b) prefetch(keys[b + BLOCKS] + d * 16 * SIZE<KIND>);
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; ++r) {
            const f32x16 x = f32x16::set1(q[r]);
#pragma GCC unroll 4
            for (int b = 0; b < BLOCKS; ++b) sums[r][b] = fma(x, k[b], sums[r][b]);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int b = 0; b < BLOCKS; ++b) sums[r][b].storeu(s + r * PART + 16 * b);
}

/* sums[row][at + 16 v + lane] += sum over keys [from, to) of p[row][key] * value[key][at + 16 v + lane]. */
template <int KIND, int ROWS, int VECTORS>
static void weigh(const uint8_t *const *values, int64_t head_dim, int64_t from, int64_t to, int64_t at, const float *p,
                  float *sums, int64_t stride) {
    f32x16 acc[ROWS][VECTORS];
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) acc[r][v] = f32x16::loadu(sums + r * stride + at + 16 * v);
    for (int64_t key = from; key < to; ++key) {
        const uint8_t *row = values[key >> 4] + ((key & 15) * head_dim + at) * SIZE<KIND>;
        f32x16 x[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) x[v] = widen<KIND>(row + 16 * v * SIZE<KIND>);
        if (ROWS < SUBTILE) {
            const uint8_t *ahead = values[(key >> 4) + AHEAD] + ((key & 15) * head_dim + at) * SIZE<KIND>;
            for (int64_t i = 0; i < 16 * VECTORS * SIZE<KIND>; i += 64) prefetch(ahead + i);
        }
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; ++r) {
            const f32x16 weight = f32x16::set1(p[r * PART + key]);
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) acc[r][v] = fma(weight, x[v], acc[r][v]);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) acc[r][v].storeu(sums + r * stride + at + 16 * v);
}

/* All dimensions of that. */
template <int KIND, int ROWS>
static void weigh_all(const uint8_t *const *values, int64_t head_dim, int64_t from, int64_t to, const float *p,
                      float *sums, int64_t stride) {
    constexpr int WIDE = side_by_side(ROWS);
    int64_t at = 0;
    for (; at + 16 * WIDE <= head_dim; at += 16 * WIDE)
        weigh<KIND, ROWS, WIDE>(values, head_dim, from, to, at, p, sums, stride);
    for (; at + 16 <= head_dim; at += 16) weigh<KIND, ROWS, 1>(values, head_dim, from, to, at, p, sums, stride);
    const int lanes = static_cast<int>(head_dim - at);
    if (lanes == 0) return;
    for (int64_t key = from; key < to; ++key) {
        const uint8_t *row = values[key >> 4] + ((key & 15) * head_dim + at) * SIZE<KIND>;
        const f32x16 x = widen_first<KIND>(row, lanes);
        for (int r = 0; r < ROWS; ++r) {
            float *sum = sums + r * stride + at;
            fma(f32x16::set1(p[r * PART + key]), x, f32x16::loadu(sum)).storeu(sum);
        }
    }
}

/* What a row sees of a part: keys [low, high), counted from the beginning of the part. */
struct Span {
    int64_t low, high;
};

/* Turns the scores of one row into weights, in place; returns their maximum and sum through `state`. */
template <int KIND>
static void weights_of(float *s, Span seen, const uint8_t *const *scales, int64_t head_dim, float softcap, float *state) {
    const f32x16 nothing = f32x16::set1(-__builtin_inff());
    const int64_t from = seen.low / 16, to = (seen.high + 15) / 16;
    f32x16 most = nothing;
    for (int64_t b = from; b < to; ++b) {
        f32x16 x = f32x16::loadu(s + 16 * b);
        if (KIND == PIPPIN_CACHE_INT8) x = x * f32x16::loadu(reinterpret_cast<const float *>(scales[b]));
        if (softcap != 0.f) x = bounded(x, softcap);
        if (seen.high < 16 * b + 16) x = first(static_cast<int>(seen.high - 16 * b), x, nothing);
        if (seen.low > 16 * b) x = first(static_cast<int>(seen.low - 16 * b), nothing, x);
        x.storeu(s + 16 * b);
        most = max(most, x);
    }
    const float peak = reduce_max(most);
    f32x16 sums = f32x16::zero();
    for (int64_t b = from; b < to; ++b) {
        f32x16 e = exp(f32x16::loadu(s + 16 * b) - f32x16::set1(peak));
        sums = sums + e;
        if (KIND == PIPPIN_CACHE_INT8) e = e * f32x16::loadu(reinterpret_cast<const float *>(scales[b]) + 16);
        e.storeu(s + 16 * b);
    }
    const int64_t end = pippin::state_stride(head_dim) - 16;
    state[end] = peak;
    state[end + 1] = reduce_add(sums);
}

/* Fold the rows of a later part into those before. Source: Milakov and Gimelshein 2018, arXiv:1805.02867. */
static void merge(float *state, const float *later, int64_t rows, int64_t head_dim) {
    const int64_t stride = pippin::state_stride(head_dim), end = stride - 16;
    for (int64_t r = 0; r < rows; ++r, state += stride, later += stride) {
        if (later[end + 1] == 0.f) continue;
        if (state[end + 1] == 0.f) {
            memcpy(state, later, static_cast<size_t>(stride) * sizeof(float));
            continue;
        }
        const float peak = state[end] > later[end] ? state[end] : later[end];
        const f32x16 a = exp(f32x16::set1(state[end] - peak)), b = exp(f32x16::set1(later[end] - peak));
        for (int64_t i = 0; i < end; i += 16)
            fma(f32x16::loadu(state + i), a, f32x16::loadu(later + i) * b).storeu(state + i);
        float weight[16], other[16];
        a.storeu(weight), b.storeu(other);
        state[end] = peak;
        state[end + 1] = state[end + 1] * weight[0] + later[end + 1] * other[0];
    }
}

/* One part for ROWS rows: scores, weights, sums of values, and the merge into the states. */
template <int KIND, int ROWS>
static void attend_rows(const uint8_t *const *keys, const uint8_t *const *next, int64_t head_dim, const Span *seen,
                        float softcap, const float *q, float *state, float *p, float *part) {
    constexpr int BLOCKS = side_by_side(ROWS);
    const int64_t stride = pippin::state_stride(head_dim);
    int64_t low = PART, high = 0, every_low = 0, every_high = PART; // seen by any row, and by every row
    for (int r = 0; r < ROWS; ++r) {
        if (seen[r].low < seen[r].high) {
            low = seen[r].low < low ? seen[r].low : low;
            high = seen[r].high > high ? seen[r].high : high;
        }
        every_low = seen[r].low > every_low ? seen[r].low : every_low;
        every_high = seen[r].high < every_high ? seen[r].high : every_high;
    }
    if (low >= high) return;
    // what is read, in order: keys, values, and what comes after this part
    const int64_t first = low / 16, blocks = (high + 15) / 16 - first;
    const uint8_t *order[2 * PART / 16 + NEXT], *scales[PART / 16];
    for (int64_t b = 0; b < blocks; ++b) {
        order[b] = keys[first + b];
        order[blocks + b] = keys[first + b] + 16 * head_dim * SIZE<KIND>;
        scales[first + b] = keys[first + b] + 32 * head_dim * SIZE<KIND>;
    }
    for (int64_t b = 0; b < NEXT; ++b) order[2 * blocks + b] = next[b];
    const uint8_t *const *values = order + blocks - first;
    int64_t b = 0;
    for (; b + BLOCKS <= blocks; b += BLOCKS) score<KIND, ROWS, BLOCKS>(order + b, head_dim, q, p + 16 * (first + b));
    for (; b < blocks; ++b) score<KIND, ROWS, 1>(order + b, head_dim, q, p + 16 * (first + b));
    memset(part, 0, static_cast<size_t>(ROWS * stride) * sizeof(float));
    for (int r = 0; r < ROWS; ++r)
        if (seen[r].low < seen[r].high) weights_of<KIND>(p + r * PART, seen[r], scales, head_dim, softcap, part + r * stride);
    const bool shared = every_low < every_high;
    if (!shared) every_low = every_high = PART;
    for (int r = 0; r < ROWS; ++r) { // keys before those that every row sees
        const int64_t to = seen[r].high < every_low ? seen[r].high : every_low;
        weigh_all<KIND, 1>(values, head_dim, seen[r].low, to, p + r * PART, part + r * stride, stride);
    }
    if (!shared) return merge(state, part, ROWS, head_dim);
    weigh_all<KIND, ROWS>(values, head_dim, every_low, every_high, p, part, stride);
    for (int r = 0; r < ROWS; ++r)
        weigh_all<KIND, 1>(values, head_dim, every_high, seen[r].high, p + r * PART, part + r * stride, stride);
    merge(state, part, ROWS, head_dim);
}

/* How many of `rest` rows to take next: one of the sizes that there is code for. */
PIPPIN_INLINE int64_t next_rows(int64_t rest) {
    if (MANY_REGISTERS && rest >= 6) return rest >= 12 ? 12 : 6;
    return rest >= 4 ? 4 : rest;
}

/* Block b of one kv head. */
PIPPIN_INLINE uint8_t *head_block(const Cache &cache, const pippin_ragged &ragged, int64_t head, int64_t b) {
    const int64_t id = ragged.tables[head * ragged.stride + b], heads = cache.block_bytes / cache.head_bytes;
    return cache.pool + id / heads * cache.block_bytes + id % heads * cache.head_bytes;
}
PIPPIN_INLINE const uint8_t *head_block(const Queries &w, int64_t kv_head, int64_t b) {
    if (w.ragged) return head_block(w.cache, *w.ragged, w.first_head + kv_head, b);
    const int32_t id = w.table[b];
    // what was given back behind a window is read and thrown away: any block will do
    return w.cache.pool + (id < 0 ? 0 : id) * w.cache.block_bytes + w.cache.offset + kv_head * w.cache.head_bytes;
}
/* Tokens that a kv head has lost. */
PIPPIN_INLINE int64_t lost(const Queries &w, int64_t kv_head) {
    return w.ragged ? w.ragged->lost[w.first_head + kv_head] : 0;
}

template <int KIND>
static void attend_as(const Queries &w, int kv_head, int64_t begin, int64_t end, int64_t from, int64_t to, float *state,
                      float *scratch) {
    const Cache &cache = w.cache;
    const int64_t head_dim = cache.head_dim, stride = pippin::state_stride(head_dim);
    const int64_t group = w.heads / cache.kv_heads, rows = (end - begin) * group, gone = lost(w, kv_head);
    float *const p = scratch + (rows * head_dim + 15) / 16 * 16, *const part = p + SUBTILE * PART;
    for (int64_t row = 0, n; row < rows; row += n) { // queries as [dimension][row] of each subtile
        n = next_rows(rows - row);
        for (int64_t r = 0; r < n; ++r) {
            const int64_t token = begin + (row + r) / group, head = kv_head * group + (row + r) % group;
            const float *q = w.q + token * w.stride + head * head_dim;
            for (int64_t d = 0; d < head_dim; ++d) scratch[row * head_dim + d * n + r] = q[d] * w.scale;
        }
    }
    for (int64_t index = from; index < to; ++index) {
        const int64_t key = index * PART;
        const int64_t last = (w.visible[end - 1] - gone) / 16; // block of the newest key that is seen
        const int64_t after = !w.ragged && kv_head + 1 < cache.kv_heads ? kv_head + 1 : kv_head;
        const auto block = [&](int64_t b, int64_t head) { return head_block(w, head, b < last ? b : last); };
        const uint8_t *keys[PART / 16], *next[NEXT];
        for (int64_t b = 0; b < PART / 16 && key / 16 + b <= last; ++b) keys[b] = block(key / 16 + b, kv_head);
        for (int64_t b = 0; b < NEXT; ++b) // of this head, or of the one after it
            next[b] = index + 1 < to ? block((key + PART) / 16 + b, kv_head)
                                     : block(from * PART / 16 + b, after);
        for (int64_t row = 0, n; row < rows; row += n) {
            n = next_rows(rows - row);
            Span seen[SUBTILE];
            for (int64_t r = 0; r < n; ++r) {
                const int64_t query = begin + (row + r) / group, slot = w.slots[query] - gone;
                const int64_t low = w.window > 0 && slot >= w.window ? slot - w.window + 1 - key : -key;
                const int64_t high = w.visible[query] - gone + 1 - key;
                seen[r].low = low < 0 ? 0 : low;
                seen[r].high = high < 0 ? 0 : high > PART ? PART : high;
                if (seen[r].low >= seen[r].high) seen[r] = {0, 0};
            }
            const float *q = scratch + row * head_dim;
            float *target = state + row * stride;
            switch (n) {
#if defined(PIPPIN_ISA_AVX512BF16) || defined(PIPPIN_ISA_AVX512VNNI)
            case 12: attend_rows<KIND, 12>(keys, next, head_dim, seen, w.softcap, q, target, p, part); break;
            case 6: attend_rows<KIND, 6>(keys, next, head_dim, seen, w.softcap, q, target, p, part); break;
#endif
            case 4: attend_rows<KIND, 4>(keys, next, head_dim, seen, w.softcap, q, target, p, part); break;
            case 3: attend_rows<KIND, 3>(keys, next, head_dim, seen, w.softcap, q, target, p, part); break;
            case 2: attend_rows<KIND, 2>(keys, next, head_dim, seen, w.softcap, q, target, p, part); break;
            default: attend_rows<KIND, 1>(keys, next, head_dim, seen, w.softcap, q, target, p, part); break;
            }
        }
    }
}

static void attend(const Queries &w, int kv_head, int64_t begin, int64_t end, int64_t from, int64_t to, float *state,
                   float *scratch) {
    switch (w.cache.kind) {
    case PIPPIN_CACHE_F32: return attend_as<PIPPIN_CACHE_F32>(w, kv_head, begin, end, from, to, state, scratch);
    case PIPPIN_CACHE_BF16: return attend_as<PIPPIN_CACHE_BF16>(w, kv_head, begin, end, from, to, state, scratch);
    default: return attend_as<PIPPIN_CACHE_INT8>(w, kv_head, begin, end, from, to, state, scratch);
    }
}

template <int KIND>
static void receive_as(const Queries &w, int kv_head, int64_t index, int64_t from, int64_t to, bool largest, float *p,
                       float *received) {
    const Cache &cache = w.cache;
    const int64_t n = cache.head_dim, group = w.heads / cache.kv_heads, first = from / 16;
    float *const q = p + (to + 15) / 16 * 16 - 16 * first;
    for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
        for (int64_t d = 0; d < n; ++d) q[d] = w.q[index * w.stride + head * n + d] * w.scale;
        constexpr float unseen = -1e30f;
        float most = unseen, sum = 0;
        for (int64_t b = first; 16 * b < to; ++b) {
            const uint8_t *keys = head_block(w, kv_head, b);
            float s[16];
            if (KIND == PIPPIN_CACHE_INT8) {
                const float *scales = reinterpret_cast<const float *>(keys + 2 * 16 * n);
                f32x16 total = f32x16::zero();
                for (int64_t d = 0; d < n; ++d) total = fma(f32x16::set1(q[d]), widen<KIND>(keys + 16 * d), total);
                (w.softcap == 0.f ? total * f32x16::loadu(scales) : bounded(total * f32x16::loadu(scales), w.softcap)).storeu(s);
            } else {
                f32x16 total = f32x16::zero();
                for (int64_t d = 0; d < n; ++d)
                    total = fma(f32x16::set1(q[d]), widen<KIND>(keys + 16 * d * SIZE<KIND>), total);
                (w.softcap == 0.f ? total : bounded(total, w.softcap)).storeu(s);
            }
            for (int64_t i = 0; i < 16; ++i) {
                const int64_t slot = 16 * b + i;
                p[slot - 16 * first] = slot >= from && slot < to ? s[i] : unseen;
                if (slot >= from && slot < to && s[i] > most) most = s[i];
            }
        }
        for (int64_t at = 0; at + 16 * first < to; at += 16) exp(f32x16::loadu(p + at) - f32x16::set1(most)).storeu(p + at);
        for (int64_t slot = from; slot < to; ++slot) sum += p[slot - 16 * first];
        for (int64_t slot = from; slot < to; ++slot) {
            const float weight = p[slot - 16 * first] / sum;
            if (!largest) received[slot] += weight;
            else if (weight > received[slot]) received[slot] = weight;
        }
    }
}

static void receive(const Queries &w, int kv_head, int64_t index, int64_t from, int64_t to, bool largest, float *p,
                    float *received) {
    switch (w.cache.kind) {
    case PIPPIN_CACHE_F32: return receive_as<PIPPIN_CACHE_F32>(w, kv_head, index, from, to, largest, p, received);
    case PIPPIN_CACHE_BF16: return receive_as<PIPPIN_CACHE_BF16>(w, kv_head, index, from, to, largest, p, received);
    default: return receive_as<PIPPIN_CACHE_INT8>(w, kv_head, index, from, to, largest, p, received);
    }
}

/* A score without a value joins weights e^(score - peak): `total`, their sum, and `values`, the factor of what they read,
 * are then relative to the larger of both. */
PIPPIN_INLINE void add_sink(float sink, float peak, float &values, float &total) {
    float share[16];
    exp(f32x16::set1(sink > peak ? peak - sink : sink - peak)).storeu(share);
    if (sink > peak) values = share[0], total = total * share[0] + 1.f;
    else total += share[0];
}

static void finish(const Queries &w, int kv_head, int64_t begin, int64_t end, const float *state) {
    const int64_t head_dim = w.cache.head_dim, stride = pippin::state_stride(head_dim), group = w.heads / w.cache.kv_heads;
    for (int64_t token = begin; token < end; ++token)
        for (int64_t head = 0; head < group; ++head, state += stride) {
            float *out = w.out + token * w.stride + (kv_head * group + head) * head_dim;
            float values = 1.f, total = state[stride - 15];
            if (w.sinks) add_sink(w.sinks[kv_head * group + head], state[stride - 16], values, total);
            const f32x16 factor = f32x16::set1(values), sum = f32x16::set1(total);
            by_16(head_dim, [&](int64_t at, int lanes) { put(f32x16::loadu(state + at) * factor / sum, out + at, lanes); });
        }
}

/* Codes of one key or value, and their scale. A value that is not finite makes the scale NaN. */
static float to_int8(const float *x, int64_t n, int8_t *codes) {
    f32x16 most = f32x16::zero(), probe = f32x16::zero();
    by_16(n, [&](int64_t at, int lanes) {
        const f32x16 a = get(x + at, lanes);
        most = max(most, abs(a));
        probe = fma(a, f32x16::zero(), probe); // NaN if any is infinite or NaN
    });
    const float scale = reduce_max(most) / 127.f;
    if (!(reduce_add(probe) == 0.f) || scale < 1e-37f) {
        memset(codes, 0, static_cast<size_t>(n));
        return reduce_add(probe) == 0.f ? 0.f : __builtin_nanf("");
    }
    const f32x16 inverse = f32x16::set1(1.f / scale);
    by_16(n, [&](int64_t at, int lanes) {
        int8_t sixteen[16];
        (get(x + at, lanes) * inverse).to_i8(sixteen);
        memcpy(codes + at, sixteen, static_cast<size_t>(lanes));
    });
    return scale;
}

/* The key and value of one token, to all heads of a layer in a block. */
static void keep(const Cache &cache, int32_t block, int slot, const float *k, const float *v) {
    const int64_t n = cache.head_dim;
    uint8_t *target = cache.pool + block * cache.block_bytes + cache.offset;
    for (int head = 0; head < cache.kv_heads; ++head, target += cache.head_bytes, k += n, v += n) {
        if (cache.kind == PIPPIN_CACHE_F32) {
            float *keys = reinterpret_cast<float *>(target);
            for (int64_t d = 0; d < n; ++d) keys[16 * d + slot] = k[d];
            memcpy(keys + 16 * n + slot * n, v, static_cast<size_t>(n) * sizeof(float));
        } else if (cache.kind == PIPPIN_CACHE_BF16) {
            uint16_t *keys = reinterpret_cast<uint16_t *>(target), *values = keys + 16 * n + slot * n;
            by_16(n, [&](int64_t at, int lanes) {
                uint16_t sixteen[16];
                get(k + at, lanes).to_bf16(sixteen);
                for (int i = 0; i < lanes; ++i) keys[16 * (at + i) + slot] = sixteen[i];
                get(v + at, lanes).to_bf16(sixteen);
                memcpy(values + at, sixteen, static_cast<size_t>(lanes) * 2);
            });
        } else {
            int8_t *keys = reinterpret_cast<int8_t *>(target), *values = keys + 16 * n;
            float *scales = reinterpret_cast<float *>(values + 16 * n);
            int8_t codes[1024];
            scales[slot] = to_int8(k, n, codes);
            for (int64_t d = 0; d < n; ++d) keys[16 * d + slot] = codes[d];
            scales[16 + slot] = to_int8(v, n, values + slot * n);
        }
    }
}

/* The same of token `slot` of a sequence whose heads lie apart; the layer has the heads from first_head on. */
static void keep_apart(const Cache &cache, const pippin_ragged &ragged, int64_t first_head, int64_t slot, const float *k,
                       const float *v) {
    Cache one = cache;
    one.kv_heads = 1, one.offset = 0;
    for (int64_t head = first_head; head < first_head + cache.kv_heads; ++head, k += cache.head_dim, v += cache.head_dim) {
        const int64_t at = slot - ragged.lost[head];
        one.pool = head_block(cache, ragged, head, at / 16);
        keep(one, 0, int(at % 16), k, v);
    }
}

static pippin::StepKernels step_kernels() {
    return {norm,  layer_norm, heads,  keep,    keep_apart, activate, open,  bound,   add,   multiply,
            dense, softmax,    attend, receive, convolve,   recur,    leave, product, merge, finish,   read};
}

} // namespace PIPPIN_NS

#endif
