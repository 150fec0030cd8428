/* How packed weights lie in memory: shared by the code that packs and the kernels that read.
 *
 * Notable here:
 * - a matrix is cut into panels of 16 outputs; each panel is one stream that is read from front to back
 * - a panel is a sequence of blocks: scales, and minima if there are any, of the block (16 rows each, half precision;
 *   float32 in the affine formats), then its units of 32 inputs
 * - a unit's codes: quad k holds inputs 4k to 4k + 3; byte 4r + j of a vector belongs to row r, input 4k + j
 *     4 bits: quad 2v in the low half of vector v, quad 2v + 1 in the high half
 *     2 bits: quads 4v to 4v + 3 in vector v, from the lowest bits up;  1 bit: eight quads in one vector
 *     8 bits: a vector for each quad;  3, 5 and 6 bits: the vectors of the low 2 or 4 bits, then those of the others
 * - dense weights: float32 [input][16], bfloat16 [pair of inputs][16][2]
 */
#ifndef PIPPIN_FORMATS_H
#define PIPPIN_FORMATS_H

#include <stdint.h>

#include "pippin.h"

namespace pippin {

struct Format {
    const char *name;  // nullptr: not a format
    int bits;          // of a code; 16 and 32: dense
    int block;         // inputs of one block; 0: the group of the matrix
    int block_head;    // bytes at the beginning of a block of 16 rows
    int unit_head;     // bytes at the beginning of a unit: 8-bit scales (and minima) of the K formats
    float zero;        // the code that stands for 0, where `pippin_matrix.zero` does not say so
    int ggml_bytes;    // of one block in a file; 0: not a format of ggml's
};

static inline Format format_of(int format) {
    switch (format) {
    case PIPPIN_F32: return {"F32", 32, 1, 0, 0, 0.f, 0};
    case PIPPIN_BF16: return {"BF16", 16, 1, 0, 0, 0.f, 0};
    case PIPPIN_Q4_0: return {"Q4_0", 4, 32, 32, 0, 8.f, 18};
    case PIPPIN_Q4_1: return {"Q4_1", 4, 32, 64, 0, 0.f, 20};
    case PIPPIN_Q5_0: return {"Q5_0", 5, 32, 32, 0, 16.f, 22};
    case PIPPIN_Q5_1: return {"Q5_1", 5, 32, 64, 0, 0.f, 24};
    case PIPPIN_Q8_0: return {"Q8_0", 8, 32, 32, 0, 128.f, 34};
    case PIPPIN_Q4_K: return {"Q4_K", 4, 256, 64, 32, 0.f, 144};
    case PIPPIN_Q5_K: return {"Q5_K", 5, 256, 64, 32, 0.f, 176};
    case PIPPIN_Q6_K: return {"Q6_K", 6, 256, 32, 32, 32.f, 210};
    case PIPPIN_INT2: return {"INT2", 2, 0, 32, 0, 0.f, 0};
    case PIPPIN_INT3: return {"INT3", 3, 0, 32, 0, 0.f, 0};
    case PIPPIN_INT4: return {"INT4", 4, 0, 32, 0, 0.f, 0};
    case PIPPIN_INT8: return {"INT8", 8, 0, 32, 0, 0.f, 0};
    case PIPPIN_AFFINE2: return {"AFFINE2", 2, 0, 128, 0, 0.f, 0};
    case PIPPIN_AFFINE3: return {"AFFINE3", 3, 0, 128, 0, 0.f, 0};
    case PIPPIN_AFFINE4: return {"AFFINE4", 4, 0, 128, 0, 0.f, 0};
    case PIPPIN_AFFINE5: return {"AFFINE5", 5, 0, 128, 0, 0.f, 0};
    case PIPPIN_AFFINE6: return {"AFFINE6", 6, 0, 128, 0, 0.f, 0};
    case PIPPIN_AFFINE8: return {"AFFINE8", 8, 0, 128, 0, 0.f, 0};
    default: return {nullptr, 0, 0, 0, 0, 0.f, 0};
    }
}
static inline bool is_dense(const Format &f) { return f.bits >= 16; }
static inline bool is_ours(const Format &f) { return f.block == 0; }
static inline bool is_affine(const Format &f) { return f.block_head == 128; }
static inline int64_t block_inputs(const Format &f, int group) { return f.block != 0 ? f.block : group; }
/* Bytes of the codes of 16 rows and 32 inputs. */
static inline int64_t code_bytes(const Format &f) { return 64 * f.bits; }
static inline int64_t block_bytes(const Format &f, int group) {
    return f.block_head + block_inputs(f, group) / 32 * (f.unit_head + code_bytes(f));
}
/* Bytes of 16 rows. */
static inline int64_t panel_bytes(const Format &f, int group, int64_t columns) {
    if (f.bits == 32) return 64 * columns;
    if (f.bits == 16) return 64 * ((columns + 1) / 2);
    return columns / block_inputs(f, group) * block_bytes(f, group);
}

}  // namespace pippin

#endif
