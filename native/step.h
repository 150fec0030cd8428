/* What the decoder asks of the vector kernels apart from matrix products: one table per instruction set.
 *
 * Notable here:
 * - every function treats one token, or the tokens of one tile, and its result for a token does not depend on the others
 */
#ifndef PIPPIN_STEP_H
#define PIPPIN_STEP_H

#include <cstdint>

#include "pippin.h"

namespace pippin {

constexpr int64_t PART = 256;    // keys whose attention is one sum; parts lie at multiples of this and merge in order
constexpr int64_t SUBTILE = 12;   // rows that share a pass over keys in registers, at most
constexpr int64_t TILE_ROWS = 48; // (query, head) pairs that attention takes together at most, unless a group is larger

/* Where the keys and values of one layer lie in the blocks of a pool. */
struct Cache {
    uint8_t *pool;
    int64_t block_bytes, offset, head_bytes; // of a block; of the layer in a block; of one head in a layer
    int kind;                                // pippin_cache
    int kv_heads, head_dim;
};

/* Queries of one sequence in one layer. */
struct Queries {
    Cache cache;
    const int32_t *table;     // blocks of the sequence
    const float *q;           // (count, heads, head_dim)
    float *out;               // the same shape
    const int32_t *slots;     // (count): of each query
    const int32_t *visible;   // (count): the last slot that each sees, ascending
    int64_t stride;           // of q and of out between tokens, in elements
    int64_t window;           // 0: all
    int heads;
    float scale;
    float softcap;            // 0: none
    const float *sinks;       // (heads), or nullptr
    const pippin_ragged *ragged = nullptr; // of the sequence; then `table` is not read
    int64_t first_head = 0;                // of the layer, among the heads of `ragged`
};

/* Attention keeps for each row [sum of values (head_dim, padded to 16), maximum, sum of weights]; 64-byte aligned. */
static inline int64_t state_stride(int64_t head_dim) { return (head_dim + 15) / 16 * 16 + 16; }
/* Mark states as having seen nothing. */
static inline void clear_states(float *state, int64_t rows, int64_t head_dim) {
    const int64_t stride = state_stride(head_dim);
    for (int64_t row = 0; row < rows; ++row) state[row * stride + stride - 15] = 0.f;
}
/* Queries that attend() takes together: enough for TILE_ROWS rows. */
static inline int64_t tile_queries(int64_t group) { return group < TILE_ROWS ? TILE_ROWS / group : 1; }
/* Floats of working memory that attend() needs for a tile; 64-byte aligned. */
static inline int64_t attend_scratch(int64_t head_dim, int64_t group) {
    const int64_t rows = tile_queries(group) * group;
    return (rows * head_dim + 15) / 16 * 16 + SUBTILE * (PART + state_stride(head_dim));
}

/* The nonlinearity of a feed-forward layer. */
struct Activation {
    int kind;           // pippin_activation
    float limit;        // 0: none
    const float *xielu; // its parameters
};

/* New tokens of one sequence on their way through a recurrence. */
struct Recurrence {
    const pippin_recurrent *layer;
    const float *entered; // what the matrices gave: (count, entered_stride)
    float *mixed;         // what the convolution gave, (count, channels)
    float *y;             // outputs, (count, heads * value_dim)
    int64_t entered_stride, conv_at, channels, step_at, beta_at, count; // columns of what enters
    const float *before;  // the state, nullptr for a beginning; may be `after`
    float *after;
};

struct StepKernels {
    /* y = weight * x / sqrt(mean(x^2) + eps); y may be x. */
    void (*norm)(const float *x, const float *weight, float eps, int64_t n, float *y);
    /* y = weight * (x - mean) / sqrt(variance + eps) + bias; y may be x. */
    void (*layer_norm)(const float *x, const float *weight, const float *bias, float eps, int64_t n, float *y);
    /* Normalize (weight may be NULL) and rotate (cos may be NULL) each of `count` heads, in place. */
    void (*heads)(float *x, int64_t count, int64_t head_dim, const float *weight, float eps, const float *cos,
                  const float *sin);
    /* Write keys and values (kv_heads, head_dim) of one token into its slot of a block. */
    void (*keep)(const Cache &cache, int32_t block, int slot, const float *k, const float *v);
    /* The same of token `slot` of a sequence whose heads lie apart; the layer has the heads from first_head on. */
    void (*keep_apart)(const Cache &cache, const pippin_ragged &ragged, int64_t first_head, int64_t slot, const float *k,
                       const float *v);
    /* gate = act(gate) * up, or act(gate) where up is NULL; limit and parameters as in pippin_layer. */
    void (*activate)(const Activation &activation, float *gate, const float *up, int64_t n);
    /* x *= sigmoid(gate). */
    void (*open)(float *x, const float *gate, int64_t n);
    /* x = cap * tanh(x / cap). */
    void (*bound)(float *x, float cap, int64_t n);
    /* x += scale * y. */
    void (*add)(float *x, const float *y, float scale, int64_t n);
    void (*multiply)(float *x, float scale, int64_t n);
    /* y = matrix x for a plain (rows, columns) float32 matrix; `sum`: y += instead. */
    void (*dense)(const float *matrix, int64_t rows, int64_t columns, const float *x, float *y, bool sum);
    /* Softmax in place. */
    void (*softmax)(float *x, int64_t n);
    /* Fold the parts [from, to) of the keys into the states of queries [begin, end) of one kv head. State row
     * (query - begin) * group + head of the group; weights of 0 mark rows that have seen nothing yet. */
    void (*attend)(const Queries &queries, int kv_head, int64_t begin, int64_t end, int64_t from, int64_t to,
                   float *state, float *scratch);
    /* Add to `received` (one number a slot) the attention that query `index` of one kv head gives to slots [from, to):
     * the sum over the heads of the group, or the largest. p: room for (to - from) rounded up to 16, and head_dim. */
    void (*receive)(const Queries &queries, int kv_head, int64_t index, int64_t from, int64_t to, bool largest, float *p,
                    float *received);
    /* The convolution of channels [from, to), multiples of 16 but for the last. */
    void (*convolve)(const Recurrence &work, int64_t from, int64_t to);
    /* The memory of one head over all tokens. */
    void (*recur)(const Recurrence &work, int64_t head);
    /* Norm and gate of one token's outputs, in place; the gate may be changed. */
    void (*leave)(const pippin_recurrent &layer, float *gate, int64_t n, float *y);
    /* x *= y. */
    void (*product)(float *x, const float *y, int64_t n);
    /* Fold the states of later parts into earlier ones. */
    void (*merge)(float *state, const float *later, int64_t rows, int64_t head_dim);
    /* Write what queries [begin, end) of one kv head read to `out`. */
    void (*finish)(const Queries &queries, int kv_head, int64_t begin, int64_t end, const float *state);
    /* Read all of a buffer of whole 512 bytes as fast as memory gives it; the result depends on every byte. */
    float (*read)(const float *data, int64_t count);
};

constexpr int FLOW_TILE = 4; // queries of a flow block that attend together

/* Consecutive new tokens of one sequence and one head of a flow block. */
struct FlowQueries {
    const float *q; // queries of the head; its keys lie `width` further on, its values `width` further still
    float *keys;    // (size, capacity)
    float *values;  // (capacity, size)
    float *out;     // (count, size)
    int64_t stride, out_stride; // of q and of out between tokens, in elements
    int64_t width, size, capacity, held, count; // capacity and size are multiples of 16
    float scale;
};

/* Floats of working memory that `attend` needs. */
static inline int64_t flow_scratch(int64_t size, int64_t capacity) { return FLOW_TILE * (size + capacity); }

struct FlowKernels {
    /* Keep the new keys and values behind those that are held, and attend in causal order. */
    void (*attend)(const FlowQueries &queries, float *scratch);
};

} // namespace pippin

#endif
