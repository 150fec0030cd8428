/* What a matrix product needs besides the weights: activations prepared once, shared by every matrix that reads them.
 *
 * Notable here:
 * - integer formats read activations as numbers of two 8-bit digits with one scale for each 32: one digit alone, a step
 *   of 1/127, changes what a small model answers to a plain question; two leave float32's answers as they are, and cost
 *   arithmetic where the memory is waited for
 * - digits, scale and sums of one token and 32 inputs lie together (`Record`), so that a kernel needs a single address
 * - records of the tokens of a tile (8, 4 or 2 by instruction set) lie side by side for each unit of 32 inputs
 * - no value of a token depends on the other tokens
 */
#ifndef PIPPIN_MATMUL_H
#define PIPPIN_MATMUL_H

#include <stdint.h>

namespace pippin {

enum class ActivationKind : int32_t {
    Float32 = 0,  // as they are: x itself is read
    BFloat16 = 1, // rounded to nearest even; an odd last input is padded with 0
    Int8 = 2      // Record
};
constexpr int kActivationKinds = 3;

constexpr int64_t kUnit = 32;    // inputs that share a scale of the activations
constexpr int64_t kMaxTile = 8;  // tokens that the kernels of any instruction set take at once

/* One token's inputs 32u to 32u + 31: x is about scale * (256 * coarse + fine). */
struct alignas(64) Record {
    int8_t coarse[32];  // in [-127, 127]
    int8_t fine[32];    // in [-127, 127]
    float scale;        // max |x| / 32512; NaN if an input is not finite (then the digits are 0); 0 for tiny |x|
    float sum;          // of 256 * coarse + fine
    float sum_low;      // of the first 16
    float sum_high;     // of the last 16
    float scaled_sum;   // scale * sum
    float unused[11];
};

/* Made by KernelTable.prepare; a view of the caller's buffer (and of x for Float32). */
struct Activations {
    ActivationKind kind;
    int64_t tokens, columns;
    const void *data;   // Record[tile][unit][token of the tile], bfloat16[token][even columns], or nullptr
    const float *x;     // (tokens, columns) as given
    int64_t stride;     // of x, in elements
};

/* What the kernels of a weight format read. */
ActivationKind activation_kind(int format);
/* Bytes of the buffer (64-byte aligned) for `prepare`; 0 for Float32. */
int64_t activation_bytes(ActivationKind kind, int64_t tokens, int64_t columns);
/* Outputs are computed in panels of 16. */
static inline int64_t panel_count(int64_t rows) { return (rows + 15) / 16; }

}  // namespace pippin

#endif
