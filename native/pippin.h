/* The C interface of Pippin's CPU kernels: weights in packed formats, a paged key-value cache, and one call per pass.
 *
 * Notable here:
 * - plain C, loaded with ctypes: nothing depends on Python's or torch's ABI
 * - the caller owns every buffer; what is made here (a model's description) is freed here
 * - functions that can fail return 0, or a negative `pippin_status`; `pippin_error` then says why, for this thread
 * - one token's arithmetic does not depend on the other tokens of a pass, on how a prompt is cut, on the number of
 *   threads or on what was cached: the results are the same to the bit (for one instruction set)
 */
#ifndef PIPPIN_H
#define PIPPIN_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
#if defined(__GNUC__) || defined(__clang__)
#pragma GCC visibility push(default) /* everything else in the library is hidden */
#endif

#define PIPPIN_ABI 10
#define PIPPIN_BLOCK 16 /* tokens of one block of the cache */
#define PIPPIN_PANEL 16 /* outputs that are computed together */

enum pippin_status {
    PIPPIN_OK = 0,
    PIPPIN_BAD_ARGUMENT = -1,
    PIPPIN_NO_MEMORY = -2,
    PIPPIN_NO_THREADS = -3,
    PIPPIN_NOT_FETCHED = -4 /* what `pippin_fetch` was asked for did not come */
};

/* Weight formats: ggml's by their number in a file, and our own. w = scale * (code - zero) [+ minimum]. */
enum pippin_format {
    PIPPIN_F32 = 0,
    PIPPIN_Q4_0 = 2,
    PIPPIN_Q4_1 = 3,
    PIPPIN_Q5_0 = 6,
    PIPPIN_Q5_1 = 7,
    PIPPIN_Q8_0 = 8,
    PIPPIN_Q4_K = 12,
    PIPPIN_Q5_K = 13,
    PIPPIN_Q6_K = 14,
    PIPPIN_BF16 = 30,
    /* ours: codes of 2, 3, 4 or 8 bits, a half-precision scale for each row and group of 32, 64 or 128 inputs */
    PIPPIN_INT2 = 102,
    PIPPIN_INT3 = 103,
    PIPPIN_INT4 = 104,
    PIPPIN_INT8 = 108,
    /* affine: codes of 2 to 6 or 8 bits, a float32 scale and minimum for each row and group of 32, 64 or 128 inputs */
    PIPPIN_AFFINE2 = 202,
    PIPPIN_AFFINE3 = 203,
    PIPPIN_AFFINE4 = 204,
    PIPPIN_AFFINE5 = 205,
    PIPPIN_AFFINE6 = 206,
    PIPPIN_AFFINE8 = 208
};

enum pippin_cache { PIPPIN_CACHE_F32 = 0, PIPPIN_CACHE_BF16 = 1, PIPPIN_CACHE_INT8 = 2 };
enum pippin_activation {
    PIPPIN_SILU = 0,
    PIPPIN_GELU = 1,
    PIPPIN_GELU_TANH = 2,
    PIPPIN_RELU = 3,
    PIPPIN_RELU2 = 4,        /* its square */
    PIPPIN_GELU_SIGMOID = 5, /* x sigmoid(1.702 x) */
    PIPPIN_XIELU = 6         /* p x^2 + b x above 0, n (e^x - 1 - x) + b x below */
};
enum pippin_norm { PIPPIN_RMS_NORM = 0, PIPPIN_LAYER_NORM = 1 };
enum pippin_qk_norm { PIPPIN_NORM_HEADS = 0, PIPPIN_NORM_ALL_HEADS = 1, PIPPIN_NORM_ROTATED_HEADS = 2 };
enum pippin_scores { PIPPIN_SOFTMAX = 0, PIPPIN_SIGMOID = 1, PIPPIN_SPARSEMIXER = 2 };

/* A packed weight of `rows` outputs and `columns` inputs. `data` is 64-byte aligned and made by a pippin_pack function.
 * group: inputs per scale (our own formats; else 0). zero: the code that means 0 (INT2 to INT8; else 0). */
typedef struct pippin_matrix {
    int32_t format;
    int32_t group;
    int64_t rows;
    int64_t columns;
    float zero;
    int32_t reserved;
    const void *data;
} pippin_matrix;

/* --- the library ------------------------------------------------------------------------------------------------- */
int pippin_abi(void);
const char *pippin_error(void);
/* What the kernels in use were compiled for: "avx512bf16", "avx512vnni", "avx2", "neon" or "generic". */
const char *pippin_instruction_set(void);
/* All that this machine could use, best first, separated by commas. */
const char *pippin_instruction_sets(void);
/* Use others (for tests, and to compare); all threads. */
int pippin_use_instruction_set(const char *name);
/* Threads of every call, the caller's included; at least 1. pin: tie each helper to a core of its own. */
int pippin_set_threads(int count, int pin);
int pippin_threads(void);
/* Bytes per second that `threads` threads read from a buffer of `bytes` bytes, best of `repeats` passes; < 0: failed. */
double pippin_read_bandwidth(int64_t bytes, int threads, int repeats);
/* Seconds of this process so far inside pippin_forward, by part, for `pippin bench --profile`:
 * [0] linear layers, [1] attention, [2] everything else, [3] waiting for threads. */
void pippin_profile(double seconds[4]);

/* --- weights ----------------------------------------------------------------------------------------------------- */
/* Bytes of the packed form; < 0 if this format cannot hold such a matrix (pippin_error says why). */
int64_t pippin_packed_bytes(int format, int group, int64_t rows, int64_t columns);
/* Blocks of ggml as they lie in a file, row after row; the values stay the same to the bit, only their order changes. */
int pippin_pack_ggml(int format, const void *blocks, int64_t rows, int64_t columns, void *target);
/* PIPPIN_F32 from float, PIPPIN_BF16 from bfloat16. row_stride in elements. */
int pippin_pack_dense(int format, const void *source, int64_t row_stride, int64_t rows, int64_t columns, void *target);
/* Our own formats: one code per byte, and half-precision scales (rows, columns / group). */
int pippin_pack_codes(int format, int group, const uint8_t *codes, const uint16_t *scales, int64_t rows,
                      int64_t columns, void *target);
/* The affine formats: the same with float32 scales and minima (rows, columns / group): w = scale * code + minimum. */
int pippin_pack_affine(int format, int group, const uint8_t *codes, const float *scales, const float *minima,
                       int64_t rows, int64_t columns, void *target);
/* The rows of `ids` as float32 (rows, columns): the values that the format stands for, with ggml's own roundings. */
int pippin_rows(const pippin_matrix *weight, const int64_t *ids, int64_t count, float *target);
/* y = x W^T + bias for x of (tokens, columns) and y of (tokens, rows); strides in elements; bias may be NULL. */
int pippin_matmul(const pippin_matrix *weight, const float *x, int64_t x_stride, int64_t tokens, const float *bias,
                  float *y, int64_t y_stride);

/* --- a decoder --------------------------------------------------------------------------------------------------- */
typedef struct pippin_expert {
    pippin_matrix gate, up, down; /* gate.rows = 0: down(act(up(x))) */
    const float *gate_bias, *up_bias, *down_bias;
} pippin_expert;

/* How the tokens of a mixture choose their experts; DeepSeek-V3, arXiv:2412.19437, section 2.1.2 has all of it. */
typedef struct pippin_router {
    const float *weight;          /* (experts, width) */
    const float *bias;            /* (experts), or NULL */
    const float *input_norm;      /* (width): its input is normalized with these weights; or NULL */
    const float *expert_scale;    /* (experts): multipliers on their weights; or NULL */
    const float *choice_bias;     /* (experts): added to the affinities for the choice alone; or NULL */
    int32_t scores, normalize;    /* normalize: the weights of a token sum to 1 before the scale */
    int32_t groups, active_groups; /* experts form groups of equal size, of which a token takes the best; 1 and 1 */
    int32_t best_two;             /* a group is as good as the sum of its best two, else as its best */
    float softcap;                /* logits become softcap * tanh(logit / softcap); 0: as they are */
    float scale, jitter;          /* of the weights; of the sparse mixer */
} pippin_router;

/* A recurrence in place of attention, or beside it. A sequence carries one vector of float32 from token to token for each
 * such layer: the last taps - 1 inputs of the convolution (taps - 1, channels), and a memory. */
enum pippin_recurrence {
    PIPPIN_CONVOLUTION = 1, /* in[0] gives b, c and u: out(c conv(b u)); no memory */
    PIPPIN_DELTA_RULE = 2,  /* in: q, k, v, b, a and the gate; a and gate go on through in[6] and in[7] where these are;
                               memory (heads, key_dim, value_dim) */
    PIPPIN_STATE_SPACE = 3, /* in[0] gives the gate, x, B, C and time steps; memory (heads, value_dim, key_dim) */
    PIPPIN_GATED_UNIT = 4   /* in: x and the gate; memory (heads * value_dim), and whether a token came before */
};
enum pippin_gate { /* of a recurrence's outputs */
    PIPPIN_GATE_PLAIN = 0,
    PIPPIN_GATE_SILU_BEFORE = 1, /* before their norm */
    PIPPIN_GATE_SILU_AFTER = 2,
    PIPPIN_GATE_SIGMOID_AFTER = 3,
    PIPPIN_GATE_ACTIVATED = 4 /* by the activation of the recurrence */
};
#define PIPPIN_INPUTS 8
typedef struct pippin_recurrent {
    int32_t kind, taps, heads, groups; /* groups: heads of keys, or of B and C, which heads share */
    int32_t key_dim, value_dim;        /* a state space: size of B and C, and channels of a head */
    int32_t gate, activation;
    int32_t tiled, reserved;           /* tiled: head h has the keys of h modulo the groups, not of h / share */
    int32_t norm_size, decays;         /* outputs are normalized so many together, or not: 0; decays: numbers of a */
    float eps, beta, min_step, max_step;
    pippin_matrix in[PIPPIN_INPUTS];
    const float *in_bias[PIPPIN_INPUTS];
    pippin_matrix out;
    const float *out_bias;
    const float *conv, *conv_bias;     /* (taps, channels), and (channels) or NULL */
    const float *rate;                 /* (heads), or (heads * value_dim) of a gated unit; negative */
    const float *step_bias;            /* (decays) */
    const float *skip;                 /* (heads): outputs have so much of x, too */
    const float *norm;                 /* (heads * value_dim) */
    const float *open[2], *open_bias[2]; /* input and recurrent gate: (heads, value_dim, value_dim), inputs first; biases */
} pippin_recurrent;

/* Latent attention: keys and values of all heads come from one vector of a token, the only one that is cached. Queries
 * come from the layer's q, the vector and the rotated part of all keys from its k. DeepSeek-V2, arXiv:2405.04434. */
typedef struct pippin_latent {
    int32_t kv_rank, rotated_dim, plain_dim, value_dim; /* head_dim is kv_rank + rotated_dim, and there is one kv head */
    pippin_matrix q_a;                                  /* rows = 0: q reads the hidden states */
    const float *q_a_bias, *q_a_norm, *kv_norm;
    const pippin_matrix *keys, *values; /* (heads): (kv_rank, plain_dim) and (value_dim, kv_rank), all of one format */
    float eps;                          /* of both norms */
    int32_t reserved;
} pippin_latent;

/* One layer; what a NULL pointer or rows = 0 leaves out is not there. Norm weights and biases are float32. Without a
 * norm before it, a part reads the hidden states as they are. */
typedef struct pippin_layer {
    pippin_matrix q, k, v, output; /* k and v only of a layer with keys of its own; without v the values are the keys */
    pippin_matrix gate, up, down;  /* gate.rows = 0: down(act(up(x))) */
    pippin_matrix attention_gate;  /* what attention read is multiplied by a sigmoid of it */
    const float *q_bias, *k_bias, *v_bias, *output_bias, *gate_bias, *up_bias, *down_bias, *attention_gate_bias;
    const float *attention_norm, *feedforward_norm;           /* before attention, before feed-forward */
    const float *post_attention_norm, *post_feedforward_norm; /* after them, before the residual is added */
    const float *attention_norm_bias, *feedforward_norm_bias, *post_attention_norm_bias, *post_feedforward_norm_bias;
    const float *q_norm, *k_norm, *v_norm; /* (head_dim); of all heads together (heads * head_dim), (kv_heads * head_dim) */
    const float *sinks;                    /* (heads): scores that take part in the softmax and have no value */
    int32_t source;                        /* layer whose keys and values are read; -1: its own */
    int32_t window; /* tokens seen, itself included; 0: all. With a source, that layer's window holds instead */
    int32_t rope;                          /* rotary table; -1: none */
    int32_t activation;
    int32_t experts, active;               /* a mixture if experts > 0; then gate, up, down are unused */
    int32_t group;                         /* the group of layers whose block table it has; from 0, none left out */
    int32_t kv_heads, head_dim;            /* of this layer; 0: those of the config */
    int32_t qk_norm;
    int32_t parallel; /* feed-forward reads the hidden states before attention is added: through its own norm, or
                         through that of attention if it has none */
    float softcap;    /* scores become softcap * tanh(score / softcap); 0: as they are */
    float limit;      /* act(min(gate, limit)) * (up in [-limit, limit] + 1); 0: act(gate) * up */
    float position_beta;   /* queries at position p are multiplied by 1 + beta ln(1 + floor(p / length)); 0: not */
    int64_t position_length;
    float xielu[4];        /* p, n and b; the fourth is 0 */
    pippin_router router;
    const pippin_expert *expert;
    pippin_expert shared;      /* beside the experts, for every token */
    const float *shared_gate;  /* (width): its output is multiplied by a sigmoid of the product with x; or NULL */
    /* A dense layer beside the experts, each with norms of its own; or NULL. Then the router reads the hidden states. */
    const float *experts_norm, *post_experts_norm, *post_dense_norm;
    /* What the layer does with its input: x += norm(projection(act(gate(x)) * input)); rows = 0: nothing. */
    pippin_matrix input_gate, input_projection;
    const float *input_norm;
    float scalar;                      /* multiplier on the hidden states that leave the layer; 1 */
    int32_t fetched;                   /* its experts have no data before they are fetched (pippin_model_fetch) */
    const pippin_latent *latent;       /* or NULL */
    const pippin_recurrent *recurrent; /* beside attention, or in its place: q.rows = 0; or NULL */
} pippin_layer;

typedef enum pippin_track_join {
    PIPPIN_JOIN_MEAN = 0,  /* of what the tracks computed */
    PIPPIN_JOIN_DELTA = 1, /* the block's input, and what each track added to it */
    PIPPIN_JOIN_SUM = 2,
} pippin_track_join;

typedef struct pippin_config {
    int64_t vocab, width, heads, kv_heads, head_dim, layers;
    float eps, attention_scale, embedding_scale;
    int32_t rope_tables;
    int32_t norm;                   /* pippin_norm of the hidden states; layer norms have biases */
    float residual_scale;           /* multiplier on what is added to the hidden states, unless it is normalized; 1 */
    float logit_scale, logit_softcap; /* logits become softcap * tanh(scale * logit / softcap); 1 and 0: as they are */
    pippin_matrix embedding, head;  /* the same data where they are tied */
    const float *final_norm, *final_norm_bias;
    const float *head_bias;         /* (vocab), or NULL */
    const float *embedding_norm;    /* (width): embeddings are normalized before they are scaled; or NULL */
    pippin_matrix position;         /* rows = 0, or an embedding of each position, which is added */
    const int32_t *rotary_dims;     /* (rope_tables): dimensions that each table rotates, those of a head or its part */
    /* Inputs of each layer beside the hidden states: a row of the table, and a projection of the embedding, normalized;
     * rows = 0: none. Table: (vocab, layers * size). */
    pippin_matrix layer_table, layer_projection;
    const float *layer_input_norm;  /* (size) */
    /* Decoders side by side: the layers are blocks of `tracks` times `track_depth`, in a block track by track. All tracks
     * of a block begin with its input and are joined at its end. tracks = 0: one layer after the other. */
    int32_t tracks, track_depth;
    int32_t track_join;             /* pippin_track_join */
} pippin_config;

typedef struct pippin_model pippin_model;
/* Copies the descriptions, not what they point to. NULL: failed. */
pippin_model *pippin_model_new(const pippin_config *config, const pippin_layer *layers);
void pippin_model_free(pippin_model *model);
/* cos and sin of (positions, half of the table's dimensions), as Rotary.tables gives them without the doubled half and the sign. They are
 * copied, and may be replaced by longer ones while a pass is running. */
int pippin_model_rope(pippin_model *model, int table, const float *cos, const float *sin, int64_t positions);

/* The axis of a position by which each frequency rotates (half of the table's dimensions); at first all rotate by axis 0. */
int pippin_model_rope_axes(pippin_model *model, int table, const uint8_t *axes);

/* Experts that are not in memory all the time, or a look at which ones are needed. In a pass, `fetch` is called for each
 * mixture, first with the experts that its tokens need, ascending, then with count = 0. It writes to `wave` those that are
 * to be computed next and have data until the next call, and returns how many; after the last ones, 0. A negative result
 * ends the pass. predicted: (depth, experts) how likely a token is to need each expert of the next mixtures, of the token
 * with the highest probability; NULL with depth 0, and rows of mixtures that do not follow are negative.
 * All tokens of a pass then go through a layer together, and a model computes one pass at a time. */
typedef int32_t (*pippin_fetch)(void *context, int32_t layer, const int32_t *needed, int32_t count,
                                const float *predicted, int32_t *wave);
int pippin_model_fetch(pippin_model *model, pippin_fetch fetch, void *context, int32_t depth);
/* Where an expert lies from now on, NULL for nowhere; during a pass only in `fetch`. */
int pippin_model_expert(pippin_model *model, int32_t layer, int32_t expert, const pippin_expert *place);

/* One block of the cache holds PIPPIN_BLOCK tokens of the layers of one group that have keys of their own; all blocks
 * are as large as those of the largest group: [cached layer][kv head]: keys transposed (head_dim, 16), then values (16, head_dim), in the cache's precision; int8
 * adds, after the values of each kv head, 16 float32 scales of the keys and 16 of the values (one for each token). */
int64_t pippin_block_bytes(const pippin_model *model, int cache);

typedef struct pippin_change { /* y[start : start + outputs] += up (down x) */
    const float *down;         /* (rank, inputs) */
    const float *up;           /* (outputs, rank), scaled */
    int64_t rank, inputs, outputs;
} pippin_change;

/* An adapter is an array of PIPPIN_CHANGES * layers changes: q, k, v, output, gate, up, down and the gate of attention of
 * each layer, the inputs of its recurrence, the output of that, and gate and projection of its own input; rank = 0: none.
 * With latent attention, q_a is changed in the place of v. */
#define PIPPIN_CHANGES (11 + PIPPIN_INPUTS)
typedef struct pippin_share { /* an adapter and the tokens that it works on */
    const pippin_change *changes;
    int32_t begin, end;
} pippin_share;

/* Rows in place of the scaled embeddings of the tokens [begin, begin + count). */
typedef struct pippin_given {
    const float *rows; /* (count, width) */
    int32_t begin, count;
} pippin_given;

/* Places where hidden states are steered, PIPPIN_SITES of each layer and then the last norm: behind the norms (before
 * attention, after it, before the feed-forward layer, after it) and behind the layer. */
#define PIPPIN_SITES 5
typedef struct pippin_steering { /* h = scale * h + shift at each site, for the tokens [begin, end) */
    const float *const *scale;   /* (PIPPIN_SITES * layers + 1) vectors of `width`; NULL: 1 and 0, both or neither */
    const float *const *shift;
    int32_t begin, end;
} pippin_steering;

/* The attention that the tokens of one sequence receive. `received` is (cached layers, kv_heads, stride), zero at first;
 * stride is at least the length of the sequence, or of its longest head if it is ragged. max: the largest weight that any
 * query and head gives; else their sum. before: weights are shared among slots below it; negative: those that a query sees. */
typedef struct pippin_observed {
    float *received;
    int64_t stride;
    int32_t sequence, max, before, reserved;
} pippin_observed;

/* A sequence whose kv heads have lost tokens, each head others, in the layers without a window that have keys of their
 * own: each head then lies in head-blocks, 16 tokens of one head in the space of a head in a block of the pool. Head-block
 * n is number n % heads in block n / heads, with `heads` = pippin_block_bytes / bytes of a head. What is left of a head is
 * in the order of the tokens, without gaps; `held` of the batch and all slots count what was lost, too. */
typedef struct pippin_ragged {
    const int32_t *tables; /* (cached layers, kv_heads, stride); those of layers with a window are not read */
    const int32_t *lost;   /* (cached layers, kv_heads): tokens, at most `held` */
    int64_t stride;
} pippin_ragged;

/* One pass over the new tokens of several sequences, laid end to end. */
typedef struct pippin_batch {
    int64_t tokens;
    const int32_t *ids;       /* (tokens) */
    int64_t sequences;
    const int32_t *starts;    /* (sequences + 1): where the tokens of each sequence begin */
    const int32_t *held;      /* (sequences): tokens in the cache before, which is the slot of the first new one */
    /* Block tables, end to end: those of all sequences for the layers of the first group, then for the next. A block
     * behind a sliding window of all layers of its group, which no new token sees, may be -1. */
    const int32_t *tables;
    const int32_t *table_starts; /* (groups * sequences + 1) */
    int64_t outputs;
    const int32_t *rows;      /* (outputs), ascending: tokens whose results are wanted */
    float *logits;            /* (outputs, vocab), or NULL */
    float *hidden;            /* (outputs, width): normalized, as the head reads them, or NULL */
    /* Layers [from, to) only. from > 0: `residual` (tokens, width) holds what enters them instead of embeddings, and
     * what leaves them is written there too if to < layers. The defaults are 0 and `layers`. */
    int32_t from, to;
    float *residual;          /* NULL for a whole pass; given with to < layers: what left layer to - 1, for all tokens */
    int64_t shares;
    const pippin_share *share;
    /* All that follows may be 0. */
    int64_t axes;             /* of the positions: 1 to 4; 0: the position of a token is its slot */
    const int32_t *positions; /* (axes, tokens): what rotations depend on */
    const int32_t *visible;   /* (tokens): the last slot that each token sees, not decreasing within a sequence; NULL: its
                                 own. Below the end of the sequence. */
    int64_t givens;
    const pippin_given *given;
    int64_t steerings;
    const pippin_steering *steering;
    /* (sequences): NULL for all experts, or (layers, expert_columns): multipliers on the weights of experts, 0 for those
     * that must not be chosen. */
    const float *const *experts;
    int64_t expert_columns;
    float *before_norm;            /* (outputs, width): hidden states before the final norm, or NULL */
    int64_t observations;
    const pippin_observed *observed;
    /* (recurrent layers, sequences): states before the pass, NULL for a beginning, and room for those after it, which
     * may not be the same. A model with recurrent layers needs both, and computes all layers. */
    const float *const *states;
    float *const *new_states;
    /* (sequences), or NULL: NULL for a sequence with tables of blocks; of others those of groups without a window are not
     * read. The layers without a window must have heads of one size and no latent attention. */
    const pippin_ragged *const *ragged;
} pippin_batch;

/* pool: blocks of pippin_block_bytes each, 64-byte aligned. Layers after the last one with keys of its own are computed
 * only for the tokens in `rows` (they leave no trace in the cache), the last one with keys likewise after its keys.
 * With to < layers, logits and hidden are those of an early exit: final norm and head after layer to - 1. */
int pippin_forward(const pippin_model *model, void *pool, int64_t blocks, int cache, const pippin_batch *batch);

/* --- a flow block ------------------------------------------------------------------------------------------------ */
/* One layer: x + write(attend(norm x)), then x + down(gelu(up(norm x))), with biases. Matrices are PIPPIN_F32. */
typedef struct pippin_flow_layer {
    pippin_matrix read, write, up, down; /* read: queries, keys and values, (3 width, width) */
    const float *read_bias, *write_bias, *up_bias, *down_bias;
    const float *norm, *norm_bias, *feed_norm, *feed_norm_bias;
} pippin_flow_layer;

typedef struct pippin_flow {
    int64_t layers, width, heads, inner, hidden; /* width / heads is a multiple of 16 */
    float eps;
    int32_t reserved;
    pippin_matrix in, out; /* (width, inner); (2 inner, width): log scales, then means, of the next token */
    const float *in_bias, *out_bias;
    const pippin_flow_layer *layer;
} pippin_flow;

/* A batch that a block reads: row b * samples + s is sample s in branch b. */
typedef struct pippin_flow_batch {
    int64_t samples, branches, tokens, capacity; /* capacity: a multiple of 16, and tokens - 1 or more */
    const float *added; /* (branches * samples, tokens - 1, width): what is added to each input */
    const float *heat;  /* (branches * samples): factors of the attention scores; NULL for none */
    float *cache;       /* (layers, branches * samples, 2 * width, capacity), finite at first */
} pippin_flow_batch;

/* Read tokens [first, first + count) of x, (samples, tokens, inner), behind `first` that were read before, and tell
 * what follows each: told is (branches * samples, count, 2 inner). */
int pippin_flow_read(const pippin_flow *flow, const pippin_flow_batch *batch, const float *x, int64_t first,
                     int64_t count, float *told);
/* Tokens [first, stop) of x from those before and z, both (samples, tokens, inner): x = mean + z exp(log scale); first
 * is at least 1. With two branches, both are the second's plus (1 + weights[token]) times the difference. */
int pippin_flow_invert(const pippin_flow *flow, const pippin_flow_batch *batch, float *x, const float *z,
                       const float *weights, int64_t first, int64_t stop);

#ifdef __cplusplus
}
#endif
#endif
