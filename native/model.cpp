/* The description of a decoder, and the checks of everything that comes in through the C interface. */
#include "model.h"

#include <algorithm>
#include <new>

#include "library.h"

namespace pippin {
namespace {

using Wide = long long; // for printf

int check_matrix(const pippin_matrix &matrix, const char *name, int64_t layer, int64_t rows, int64_t columns,
                 bool absent = false) {
    if (matrix.rows != rows || matrix.columns != columns)
        return fail(PIPPIN_BAD_ARGUMENT, "layer %lld: %s is %lld x %lld, but %lld x %lld is what fits", Wide(layer), name,
                    Wide(matrix.rows), Wide(matrix.columns), Wide(rows), Wide(columns));
    if ((!matrix.data && !absent) || reinterpret_cast<uintptr_t>(matrix.data) % 64)
        return fail(PIPPIN_BAD_ARGUMENT, "layer %lld: %s has no data at a multiple of 64 bytes", Wide(layer), name);
    return pippin_packed_bytes(matrix.format, matrix.group, rows, columns) < 0 ? PIPPIN_BAD_ARGUMENT : PIPPIN_OK;
}

/* absent: the matrices may have no data. */
int check_feedforward(const pippin_expert &part, int64_t layer, int64_t width, bool absent = false) {
    if (part.up.rows < 1) return fail(PIPPIN_BAD_ARGUMENT, "layer %lld: up has no rows", Wide(layer));
    if (part.gate.rows)
        if (int status = check_matrix(part.gate, "gate", layer, part.up.rows, width, absent)) return status;
    if (int status = check_matrix(part.up, "up", layer, part.up.rows, width, absent)) return status;
    return check_matrix(part.down, "down", layer, width, part.up.rows, absent);
}

int check_mixture(const pippin_layer &layer, int64_t index, int64_t width) {
    const pippin_router &router = layer.router;
    if (layer.experts < 0 || layer.active < 1 || layer.active > layer.experts || !router.weight || !layer.expert)
        return fail(PIPPIN_BAD_ARGUMENT, "layer %lld: %d of %d experts, or no router", Wide(index), layer.active,
                    layer.experts);
    if (!(router.softcap >= 0.f))
        return fail(PIPPIN_BAD_ARGUMENT, "layer %lld: router logits bounded by %g", Wide(index), double(router.softcap));
    if (router.scores < PIPPIN_SOFTMAX || router.scores > PIPPIN_SPARSEMIXER)
        return fail(PIPPIN_BAD_ARGUMENT, "layer %lld: no such scores of a router: %d", Wide(index), router.scores);
    if (router.groups < 1 || router.groups > kMostGroups || layer.experts % router.groups || router.active_groups < 1 ||
        router.active_groups > router.groups || layer.experts / router.groups * router.active_groups < layer.active)
        return fail(PIPPIN_BAD_ARGUMENT, "layer %lld: %d of %d groups of %d experts, of which a token takes %d", Wide(index),
                    router.active_groups, router.groups, layer.experts, layer.active);
    for (int32_t e = 0; e < layer.experts; ++e) {
        if (int status = check_feedforward(layer.expert[e], index, width, layer.fetched)) return status;
        if (layer.expert[e].up.rows != layer.expert[0].up.rows || !layer.expert[e].gate.rows != !layer.expert[0].gate.rows)
            return fail(PIPPIN_BAD_ARGUMENT, "layer %lld: experts of different sizes", Wide(index));
    }
    return layer.shared.up.rows ? check_feedforward(layer.shared, index, width) : PIPPIN_OK;
}

/* The matrices of a recurrence have the sizes that its heads ask for. */
int check_recurrent(const pippin_recurrent &r, int64_t index, int64_t width) {
    const bool known = r.kind >= PIPPIN_CONVOLUTION && r.kind <= PIPPIN_GATED_UNIT && r.gate >= PIPPIN_GATE_PLAIN &&
                       r.gate <= PIPPIN_GATE_ACTIVATED && r.activation >= PIPPIN_SILU && r.activation < PIPPIN_XIELU;
    if (!known || r.taps < 1 || r.heads < 1 || r.groups < 1 || r.heads % r.groups || r.value_dim < 1 || r.key_dim < 0)
        return fail(PIPPIN_BAD_ARGUMENT, "layer %lld: a recurrence of kind %d with %d taps, %d heads in %d groups",
                    Wide(index), r.kind, r.taps, r.heads, r.groups);
    const bool delta = r.kind == PIPPIN_DELTA_RULE, space = r.kind == PIPPIN_STATE_SPACE, unit = r.kind == PIPPIN_GATED_UNIT;
    if ((delta || space) && (r.key_dim < 1 || r.key_dim > 1024))
        return fail(PIPPIN_BAD_ARGUMENT, "layer %lld: keys of %d dimensions, 1 to 1024 can be", Wide(index), r.key_dim);
    const int64_t values = int64_t(r.heads) * r.value_dim, keys = int64_t(r.groups) * r.key_dim;
    if (!r.conv || (r.norm_size && (!r.norm || r.norm_size < 1 || values % r.norm_size)) ||
        ((delta || space) && (!r.rate || !r.step_bias)) || (space && !r.skip) ||
        (delta && r.decays != r.heads && r.decays != r.heads * r.key_dim) ||
        (unit && (!r.rate || !r.open[0] || !r.open[1] || !r.open_bias[0] || !r.open_bias[1])))
        return fail(PIPPIN_BAD_ARGUMENT, "layer %lld: a part of the recurrence is missing, or norms of %d of %lld outputs",
                    Wide(index), r.norm_size, Wide(values));
    const bool low = delta && r.in[6].rows;
    const int64_t rank = r.in[4].rows, gate_rank = r.in[5].rows;
    const int64_t rows[4][6] = {{3 * values}, {keys, keys, values, r.heads, low ? rank : r.decays, low ? gate_rank : values},
                                {2 * values + 2 * keys + r.heads}, {values, values}};
    for (int i = 0; i < 6; ++i) {
        const int64_t wanted = rows[r.kind - 1][i];
        if (!wanted && r.in[i].rows) return fail(PIPPIN_BAD_ARGUMENT, "layer %lld: input %d is not used", Wide(index), i);
        if (int status = wanted ? check_matrix(r.in[i], "an input of the recurrence", index, wanted, width) : 0) return status;
    }
    if (low && (rank < 1 || rank != gate_rank)) // they share their memory
        return fail(PIPPIN_BAD_ARGUMENT, "layer %lld: gates of ranks %lld and %lld", Wide(index), Wide(rank), Wide(gate_rank));
    if (int status = low ? check_matrix(r.in[6], "a gate of the recurrence", index, r.decays, rank) : 0) return status;
    if (int status = low ? check_matrix(r.in[7], "a gate of the recurrence", index, values, rank) : 0) return status;
    return check_matrix(r.out, "the output of the recurrence", index, width, values);
}

int check_latent(const pippin_config &config, const pippin_layer &layer, int64_t index) {
    const pippin_latent &l = *layer.latent;
    const int64_t sizes[] = {l.kv_rank, l.rotated_dim, l.plain_dim, l.value_dim};
    if (*std::min_element(sizes, sizes + 4) < 1 || config.kv_heads != 1 || config.head_dim != l.kv_rank + l.rotated_dim ||
        layer.kv_heads || layer.head_dim || layer.source >= 0 || layer.attention_gate.rows || !l.kv_norm || !l.keys ||
        !l.values || (l.q_a.rows && !l.q_a_norm))
        return fail(PIPPIN_BAD_ARGUMENT, "layer %lld: latent attention of %d + %d dimensions, or a part is missing",
                    Wide(index), l.kv_rank, l.rotated_dim);
    if (layer.rope >= 0 && config.rotary_dims[layer.rope] != l.rotated_dim)
        return fail(PIPPIN_BAD_ARGUMENT, "layer %lld rotates %d dimensions by a table of %d", Wide(index), l.rotated_dim,
                    config.rotary_dims[layer.rope]);
    if (int status = l.q_a.rows ? check_matrix(l.q_a, "q_a", index, l.q_a.rows, config.width) : 0) return status;
    const int64_t inputs = l.q_a.rows ? l.q_a.rows : config.width, size = l.plain_dim + l.rotated_dim;
    if (int status = check_matrix(layer.q, "q", index, config.heads * size, inputs)) return status;
    if (int status = check_matrix(layer.k, "k", index, config.head_dim, config.width)) return status;
    if (int status = check_matrix(layer.output, "output", index, config.width, config.heads * l.value_dim)) return status;
    for (int64_t head = 0; head < config.heads; ++head) {
        if (int status = check_matrix(l.keys[head], "keys of a head", index, l.kv_rank, l.plain_dim)) return status;
        if (int status = check_matrix(l.values[head], "values of a head", index, l.value_dim, l.kv_rank)) return status;
        const bool known = l.keys[head].format == PIPPIN_F32 || l.keys[head].format == PIPPIN_BF16;
        if (!known || l.keys[head].format != l.keys[0].format || l.values[head].format != l.keys[0].format)
            return fail(PIPPIN_BAD_ARGUMENT, "layer %lld: matrices of heads must all be float32 or all bfloat16", Wide(index));
    }
    return PIPPIN_OK;
}

int check_layer(const pippin_config &config, const pippin_layer *layers, int64_t index) {
    const pippin_layer &layer = layers[index];
    const int64_t width = config.width, head_dim = layer.head_dim ? layer.head_dim : config.head_dim;
    const int64_t kv_heads = layer.kv_heads ? layer.kv_heads : config.kv_heads;
    const int64_t q = config.heads * head_dim, kv = kv_heads * head_dim;
    if (kv_heads < 1 || config.heads % kv_heads)
        return fail(PIPPIN_BAD_ARGUMENT, "%lld heads are no multiple of %lld kv heads", Wide(config.heads), Wide(kv_heads));
    if (head_dim < 2 || head_dim % 2 || head_dim > 1024)
        return fail(PIPPIN_BAD_ARGUMENT, "a head has an even number of dimensions up to 1024, not %lld", Wide(head_dim));
    if (layer.source < -1 || layer.source >= index || (layer.source >= 0 && (layers[layer.source].source != -1 || !layers[layer.source].q.rows)))
        return fail(PIPPIN_BAD_ARGUMENT, "layer %lld reads layer %d, which is not an earlier one with its own keys",
                    Wide(index), layer.source);
    if (layer.rope < -1 || layer.rope >= config.rope_tables)
        return fail(PIPPIN_BAD_ARGUMENT, "layer %lld: rotary table %d of %d", Wide(index), layer.rope,
                    config.rope_tables);
    if (layer.group < 0 || layer.group >= config.layers)
        return fail(PIPPIN_BAD_ARGUMENT, "layer %lld is in group %d", Wide(index), layer.group);
    if (layer.window < 0 || layer.activation < PIPPIN_SILU || layer.activation > PIPPIN_XIELU)
        return fail(PIPPIN_BAD_ARGUMENT, "layer %lld: window %d and activation %d", Wide(index), layer.window,
                    layer.activation);
    if (layer.qk_norm < PIPPIN_NORM_HEADS || layer.qk_norm > PIPPIN_NORM_ROTATED_HEADS)
        return fail(PIPPIN_BAD_ARGUMENT, "layer %lld: no such norm of queries and keys: %d", Wide(index), layer.qk_norm);
    if (!(layer.softcap >= 0.f) || !(layer.limit >= 0.f) || (layer.position_beta != 0.f && layer.position_length < 1))
        return fail(PIPPIN_BAD_ARGUMENT, "layer %lld: bounds %g and %g, positions in steps of %lld", Wide(index),
                    double(layer.softcap), double(layer.limit), Wide(layer.position_length));
    const bool attends = layer.q.rows, feeds = layer.up.rows || layer.experts;
    if (!attends && !layer.recurrent && !feeds) return fail(PIPPIN_BAD_ARGUMENT, "layer %lld is empty", Wide(index));
    if ((attends || layer.recurrent) && !layer.attention_norm && !layer.post_attention_norm)
        return fail(PIPPIN_BAD_ARGUMENT, "layer %lld has no norms", Wide(index));
    if (layer.parallel && !feeds)
        return fail(PIPPIN_BAD_ARGUMENT, "layer %lld has no parts that could be parallel", Wide(index));
    const bool biased = (!layer.attention_norm || layer.attention_norm_bias) &&
                        (!layer.feedforward_norm || layer.feedforward_norm_bias) &&
                        (!layer.post_attention_norm || layer.post_attention_norm_bias) &&
                        (!layer.post_feedforward_norm || layer.post_feedforward_norm_bias);
    if (config.norm == PIPPIN_LAYER_NORM && !biased)
        return fail(PIPPIN_BAD_ARGUMENT, "layer %lld has a layer norm without a bias", Wide(index));
    if (layer.recurrent)
        if (int status = check_recurrent(*layer.recurrent, index, width)) return status;
    if (!attends && layer.source >= 0)
        return fail(PIPPIN_BAD_ARGUMENT, "layer %lld reads keys and does not attend", Wide(index));
    if (layer.latent) {
        if (int status = check_latent(config, layer, index)) return status;
    } else if (attends) {
        if (layer.rope >= 0 && config.rotary_dims[layer.rope] != head_dim)
            return fail(PIPPIN_BAD_ARGUMENT, "layer %lld rotates heads of %lld dimensions by a table of %d", Wide(index),
                        Wide(head_dim), config.rotary_dims[layer.rope]);
        const pippin_layer &read = layer.source < 0 ? layer : layers[layer.source];
        if (layer.source >= 0 && (read.kv_heads != layer.kv_heads || read.head_dim != layer.head_dim))
            return fail(PIPPIN_BAD_ARGUMENT, "layer %lld reads keys of other heads than its own", Wide(index));
        if (int status = check_matrix(layer.q, "q", index, q, width)) return status;
        if (int status = check_matrix(layer.output, "output", index, width, q)) return status;
    }
    if (attends && !layer.latent && layer.source < 0) {
        if (int status = check_matrix(layer.k, "k", index, kv, width)) return status;
        if (layer.v.rows)
            if (int status = check_matrix(layer.v, "v", index, kv, width)) return status;
    }
    if (layer.attention_gate.rows)
        if (int status = check_matrix(layer.attention_gate, "the gate of attention", index, q, width)) return status;
    if (!feeds) return PIPPIN_OK;
    if (layer.input_gate.rows) {
        const int64_t size = config.layer_table.columns / config.layers;
        if (!config.layer_table.rows || !layer.input_norm)
            return fail(PIPPIN_BAD_ARGUMENT, "layer %lld has no input of its own, or no norm for it", Wide(index));
        if (int status = check_matrix(layer.input_gate, "gate of the input", index, size, width)) return status;
        if (int status = check_matrix(layer.input_projection, "projection of the input", index, width, size)) return status;
    }
    const bool both = layer.experts_norm;
    if (both && (!layer.experts || !layer.post_experts_norm || !layer.post_dense_norm || config.norm != PIPPIN_RMS_NORM))
        return fail(PIPPIN_BAD_ARGUMENT, "layer %lld: no experts beside the dense layer, or a norm is missing", Wide(index));
    if (layer.experts)
        if (int status = check_mixture(layer, index, width)) return status;
    if (layer.experts && !both) return PIPPIN_OK;
    return check_feedforward({layer.gate, layer.up, layer.down, nullptr, nullptr, nullptr}, index, width);
}

int check_config(const pippin_config *config, const pippin_layer *layers) {
    if (!config || !layers) return fail(PIPPIN_BAD_ARGUMENT, "no configuration");
    const pippin_config &c = *config;
    if (c.vocab < 1 || c.width < 1 || c.layers < 1 || c.heads < 1 || c.kv_heads < 1 || c.rope_tables < 0)
        return fail(PIPPIN_BAD_ARGUMENT, "a decoder of %lld layers, %lld heads, %lld kv heads, width %lld, %lld tokens",
                    Wide(c.layers), Wide(c.heads), Wide(c.kv_heads), Wide(c.width), Wide(c.vocab));
    for (int32_t table = 0; table < c.rope_tables; ++table)
        if (!c.rotary_dims || c.rotary_dims[table] < 2 || c.rotary_dims[table] % 2)
            return fail(PIPPIN_BAD_ARGUMENT, "rotary table %d has no even number of dimensions", table);
    if (c.norm < PIPPIN_RMS_NORM || c.norm > PIPPIN_LAYER_NORM || !c.final_norm ||
        (c.norm == PIPPIN_LAYER_NORM && !c.final_norm_bias))
        return fail(PIPPIN_BAD_ARGUMENT, "no final norm, or norms of kind %d", c.norm);
    if (!(c.logit_softcap >= 0.f)) return fail(PIPPIN_BAD_ARGUMENT, "logits bounded by %g", double(c.logit_softcap));
    if (int status = check_matrix(c.embedding, "embedding", -1, c.vocab, c.width)) return status;
    if (int status = check_matrix(c.head, "head", -1, c.vocab, c.width)) return status;
    if (c.layer_table.rows) {
        const int64_t columns = c.layer_table.columns;
        if (columns < 1 || columns % c.layers || !c.layer_input_norm || c.width < columns / c.layers)
            return fail(PIPPIN_BAD_ARGUMENT, "inputs of layers of %lld numbers, or no norm", Wide(columns));
        if (int status = check_matrix(c.layer_table, "inputs of layers", -1, c.vocab, columns)) return status;
        if (int status = check_matrix(c.layer_projection, "projection to inputs of layers", -1, columns, c.width)) return status;
    }
    if (c.tracks && (c.tracks < 0 || c.track_depth < 1 || c.layers % (int64_t(c.tracks) * c.track_depth) ||
                     c.track_join < PIPPIN_JOIN_MEAN || c.track_join > PIPPIN_JOIN_SUM))
        return fail(PIPPIN_BAD_ARGUMENT, "%lld layers in %d tracks of %d, joined by %d", Wide(c.layers), c.tracks,
                    c.track_depth, c.track_join);
    for (int64_t index = 0; c.tracks && index < c.layers; ++index)
        if (layers[index].source >= 0)
            return fail(PIPPIN_BAD_ARGUMENT, "layer %lld of a track shares keys", Wide(index));
    if (c.position.rows)
        if (int status = check_matrix(c.position, "positions", -1, c.position.rows, c.width)) return status;
    for (int64_t index = 0; index < c.layers; ++index)
        if (int status = check_layer(c, layers, index)) return status;
    return PIPPIN_OK;
}

/* Sequences and their blocks. */
int check_sequences(const pippin_model &model, int64_t blocks, const pippin_batch &b) {
    if (b.sequences < 1 || !b.starts || !b.held || (!b.tables && !b.ragged) || !b.table_starts)
        return fail(PIPPIN_BAD_ARGUMENT, "%lld sequences, or their description is NULL", Wide(b.sequences));
    if (b.starts[0] != 0 || b.starts[b.sequences] != b.tokens)
        return fail(PIPPIN_BAD_ARGUMENT, "sequences cover tokens %d to %d of %lld", b.starts[0], b.starts[b.sequences],
                    Wide(b.tokens));
    const int64_t groups = int64_t(model.group_windows.size());
    std::vector<int32_t> written;
    for (int64_t g = 0; g < groups; ++g)
    for (int64_t s = 0; s < b.sequences; ++s) {
        const int64_t fresh = int64_t(b.starts[s + 1]) - b.starts[s], length = b.held[s] + fresh;
        if (fresh < 1 || b.starts[s + 1] > b.tokens)
            return fail(PIPPIN_BAD_ARGUMENT, "sequence %lld has tokens %d to %d", Wide(s), b.starts[s], b.starts[s + 1]);
        if (b.held[s] < 0 || length > INT32_MAX)
            return fail(PIPPIN_BAD_ARGUMENT, "sequence %lld holds %d tokens", Wide(s), b.held[s]);
        if (b.ragged && b.ragged[s]) continue; // its heads lie apart
        const int64_t needed = (length + PIPPIN_BLOCK - 1) / PIPPIN_BLOCK;
        const int32_t *const start = b.table_starts + g * b.sequences + s;
        if (int64_t(start[1]) - start[0] < needed || start[0] < 0)
            return fail(PIPPIN_BAD_ARGUMENT, "sequence %lld needs %lld blocks for %lld tokens, and its table has %lld",
                        Wide(s), Wide(needed), Wide(length), Wide(start[1]) - start[0]);
        const int32_t *table = b.tables + start[0];
        const int64_t window = model.group_windows[size_t(g)];
        const int64_t seen = window && b.held[s] >= window ? (b.held[s] - window + 1) / PIPPIN_BLOCK : 0;
        for (int64_t i = 0; i < needed; ++i)
            if (table[i] < (i < seen ? -1 : 0) || table[i] >= blocks)
                return fail(PIPPIN_BAD_ARGUMENT, "sequence %lld: block %d of a pool of %lld", Wide(s), table[i],
                            Wide(blocks));
        written.insert(written.end(), table + b.held[s] / PIPPIN_BLOCK, table + needed);
    }
    std::sort(written.begin(), written.end());
    const auto twice = std::adjacent_find(written.begin(), written.end());
    if (twice != written.end())
        return fail(PIPPIN_BAD_ARGUMENT, "block %d would be written twice in one pass", *twice);
    return PIPPIN_OK;
}

/* Tokens of the longest head of a sequence. */
int64_t longest_head(const pippin_model &model, const pippin_batch &b, int64_t s) {
    int64_t lost = b.ragged && b.ragged[s] ? INT32_MAX : 0;
    for (const pippin_layer &layer : model.layers) {
        if (!layer.q.rows || layer.source >= 0 || !lost) continue;
        const size_t index = size_t(&layer - model.layers.data());
        const int32_t *first = b.ragged[s]->lost + model.cached_index[index] * model.config.kv_heads;
        lost = std::min<int64_t>(lost, *std::min_element(first, first + layer.kv_heads));
    }
    return int64_t(b.held[s]) - lost + b.starts[s + 1] - b.starts[s];
}

/* Sequences whose heads have lost tokens. */
int check_ragged(const pippin_model &model, int64_t blocks, int cache, const pippin_batch &b) {
    const pippin_config &c = model.config;
    int64_t dimensions = 0;
    std::vector<int64_t> layers; // with keys of their own
    for (int64_t l = 0; l < c.layers; ++l) {
        const pippin_layer &layer = model.layers[size_t(l)];
        if (!layer.q.rows) continue;
        if (layer.source >= 0) continue;
        if (layer.latent || (dimensions && layer.head_dim != dimensions))
            return fail(PIPPIN_BAD_ARGUMENT, "heads lie apart, and layer %lld has latent attention or heads of %d", Wide(l),
                        layer.head_dim);
        dimensions = layer.head_dim;
        layers.push_back(l);
    }
    if (layers.empty()) return fail(PIPPIN_BAD_ARGUMENT, "heads lie apart in a model without keys");
    const int64_t heads = blocks * (model.block_bytes(cache) / heads_bytes(1, dimensions, cache));
    std::vector<int32_t> written;
    for (int64_t s = 0; s < b.sequences; ++s) {
        const pippin_ragged *ragged = b.ragged[s];
        if (!ragged) continue;
        if (!ragged->tables || !ragged->lost || b.held[s] < 0)
            return fail(PIPPIN_BAD_ARGUMENT, "sequence %lld: the tables of its heads are NULL", Wide(s));
        const int64_t end = int64_t(b.held[s]) + b.starts[s + 1] - b.starts[s];
        for (const int64_t l : layers)
            for (int64_t head = 0; head < model.layers[size_t(l)].kv_heads; ++head) {
                const int64_t at = model.cached_index[size_t(l)] * c.kv_heads + head, lost = ragged->lost[at];
                const int64_t needed = (end - lost + PIPPIN_BLOCK - 1) / PIPPIN_BLOCK;
                if (lost < 0 || lost > b.held[s] || needed > ragged->stride)
                    return fail(PIPPIN_BAD_ARGUMENT, "sequence %lld, layer %lld: %lld of %d tokens are lost, %lld blocks of %lld",
                                Wide(s), Wide(l), Wide(lost), b.held[s], Wide(needed), Wide(ragged->stride));
                const int32_t *table = ragged->tables + at * ragged->stride;
                for (int64_t i = 0; i < needed; ++i)
                    if (table[i] < 0 || table[i] >= heads)
                        return fail(PIPPIN_BAD_ARGUMENT, "sequence %lld: head-block %d of a pool of %lld", Wide(s), table[i],
                                    Wide(heads));
                written.insert(written.end(), table + (b.held[s] - lost) / PIPPIN_BLOCK, table + needed);
            }
    }
    std::sort(written.begin(), written.end());
    const auto twice = std::adjacent_find(written.begin(), written.end());
    if (twice != written.end())
        return fail(PIPPIN_BAD_ARGUMENT, "head-block %d would be written twice in one pass", *twice);
    return PIPPIN_OK;
}

int check_changes(const pippin_model &model, const pippin_share &share) {
    for (int64_t l = 0; l < model.config.layers; ++l) {
        const pippin_layer &layer = model.layers[size_t(l)];
        const pippin_recurrent &recurrent = model.recurrent[size_t(l)];
        const pippin_matrix *matrices[PIPPIN_CHANGES] = {&layer.q,  &layer.k,    &layer.v, &layer.output, &layer.gate,
                                                         &layer.up, &layer.down, &layer.attention_gate};
        if (layer.latent) matrices[2] = &model.latent[size_t(l)].q_a;
        for (int i = 0; i < PIPPIN_INPUTS; ++i) matrices[8 + i] = &recurrent.in[i];
        matrices[8 + PIPPIN_INPUTS] = &recurrent.out;
        matrices[9 + PIPPIN_INPUTS] = &layer.input_gate, matrices[10 + PIPPIN_INPUTS] = &layer.input_projection;
        for (int i = 0; i < PIPPIN_CHANGES; ++i) {
            const pippin_change &change = share.changes[PIPPIN_CHANGES * l + i];
            if (change.rank == 0) continue;
            if (change.rank < 0 || !change.down || !change.up || change.inputs != matrices[i]->columns ||
                change.outputs != matrices[i]->rows || (i > 3 && i < 7 && layer.experts && !layer.experts_norm))
                return fail(PIPPIN_BAD_ARGUMENT, "an adapter's change %d of layer %lld (rank %lld, %lld x %lld) does not fit",
                            i, Wide(l), Wide(change.rank), Wide(change.outputs), Wide(change.inputs));
        }
    }
    return PIPPIN_OK;
}

int check_states(const pippin_model &model, const pippin_batch &b) {
    const int64_t recurrent = std::count_if(model.states.begin(), model.states.end(), [](int32_t s) { return s >= 0; });
    if (!recurrent) return PIPPIN_OK;
    if (!b.states || !b.new_states || b.from != 0 || b.to != model.config.layers)
        return fail(PIPPIN_BAD_ARGUMENT, "layers %d to %d of a model with states, or states are NULL", b.from, b.to);
    for (int64_t i = 0; i < recurrent * b.sequences; ++i)
        if (!b.new_states[i] || b.new_states[i] == b.states[i] || !b.states[i] != !b.held[i % b.sequences])
            return fail(PIPPIN_BAD_ARGUMENT, "state %lld is missing, would be overwritten, or begins in the middle", Wide(i));
    return PIPPIN_OK;
}

/* What is wanted, of which layers, and with which adapters. */
int check_wishes(const pippin_model &model, const pippin_batch &b) {
    if (b.from < 0 || b.to <= b.from || b.to > model.config.layers)
        return fail(PIPPIN_BAD_ARGUMENT, "layers %d to %d of %lld", b.from, b.to, Wide(model.config.layers));
    if (const int64_t block = int64_t(model.config.tracks) * model.config.track_depth; block && (b.from % block || b.to % block))
        return fail(PIPPIN_BAD_ARGUMENT, "layers %d to %d of tracks that are joined after every %lld", b.from, b.to, Wide(block));
    if (b.from > 0 && !b.residual) return fail(PIPPIN_BAD_ARGUMENT, "a pass from layer %d needs a residual", b.from);
    if (b.outputs < 0 || (b.outputs > 0 && !b.rows))
        return fail(PIPPIN_BAD_ARGUMENT, "%lld outputs, or rows is NULL", Wide(b.outputs));
    for (int64_t i = 0; i < b.outputs; ++i)
        if (b.rows[i] < 0 || b.rows[i] >= b.tokens || (i > 0 && b.rows[i] <= b.rows[i - 1]))
            return fail(PIPPIN_BAD_ARGUMENT, "row %d of %lld tokens, or out of order", b.rows[i], Wide(b.tokens));
    if (b.shares < 0 || (b.shares > 0 && !b.share)) return fail(PIPPIN_BAD_ARGUMENT, "%lld shares", Wide(b.shares));
    for (int64_t i = 0; i < b.shares; ++i) {
        const pippin_share &share = b.share[i];
        if (!share.changes || share.begin < 0 || share.end < share.begin || share.end > b.tokens)
            return fail(PIPPIN_BAD_ARGUMENT, "an adapter for tokens %d to %d of %lld", share.begin, share.end,
                        Wide(b.tokens));
        if (int status = check_changes(model, share)) return status;
    }
    return PIPPIN_OK;
}

/* Positions, and the slots that tokens see. */
int check_sight(const pippin_model &model, const pippin_batch &b) {
    if (b.axes < 0 || b.axes > 4 || (b.axes > 0 && !b.positions))
        return fail(PIPPIN_BAD_ARGUMENT, "positions of %lld axes, or NULL", Wide(b.axes));
    for (int64_t i = 0; i < b.axes * b.tokens; ++i)
        if (b.positions[i] < 0) return fail(PIPPIN_BAD_ARGUMENT, "a token has position %d", b.positions[i]);
    for (const auto &rope : model.tables())
        for (size_t i = 0; rope && b.axes > 0 && i < rope->axes.size(); ++i)
            if (rope->axes[i] >= b.axes && b.axes > 1)
                return fail(PIPPIN_BAD_ARGUMENT, "a frequency rotates by axis %d of %lld", rope->axes[i], Wide(b.axes));
    for (int64_t s = 0; b.visible && s < b.sequences; ++s)
        for (int32_t t = b.starts[s]; t < b.starts[s + 1]; ++t) {
            const int64_t own = int64_t(b.held[s]) + t - b.starts[s], end = int64_t(b.held[s]) + b.starts[s + 1] - b.starts[s];
            if (b.visible[t] < own || b.visible[t] >= end || (t > b.starts[s] && b.visible[t] < b.visible[t - 1]))
                return fail(PIPPIN_BAD_ARGUMENT, "token %d sees slots up to %d: not its own, beyond the pass, or fewer than "
                                                 "the token before", t, b.visible[t]);
        }
    return PIPPIN_OK;
}

/* Embeddings that are given, steering, masks of experts, and what is observed. */
int check_extras(const pippin_model &model, const pippin_batch &b) {
    if (b.givens < 0 || (b.givens > 0 && !b.given) || b.steerings < 0 || (b.steerings > 0 && !b.steering) ||
        b.observations < 0 || (b.observations > 0 && !b.observed))
        return fail(PIPPIN_BAD_ARGUMENT, "%lld embeddings, %lld steerings, %lld observations, or NULL", Wide(b.givens),
                    Wide(b.steerings), Wide(b.observations));
    for (int64_t i = 0; i < b.givens; ++i)
        if (!b.given[i].rows || b.given[i].begin < 0 || b.given[i].count < 0 ||
            int64_t(b.given[i].begin) + b.given[i].count > b.tokens)
            return fail(PIPPIN_BAD_ARGUMENT, "embeddings of %d tokens from %d on, of %lld", b.given[i].count,
                        b.given[i].begin, Wide(b.tokens));
    for (int64_t i = 0; i < b.steerings; ++i) {
        const pippin_steering &steering = b.steering[i];
        if (!steering.scale || !steering.shift || steering.begin < 0 || steering.end < steering.begin ||
            steering.end > b.tokens)
            return fail(PIPPIN_BAD_ARGUMENT, "a steering of tokens %d to %d of %lld", steering.begin, steering.end,
                        Wide(b.tokens));
        for (int64_t site = 0; site <= PIPPIN_SITES * model.config.layers; ++site)
            if (!steering.scale[site] != !steering.shift[site])
                return fail(PIPPIN_BAD_ARGUMENT, "a steering has a scale or a shift alone at site %lld", Wide(site));
    }
    for (int64_t l = 0; b.experts && l < model.config.layers; ++l) {
        const pippin_layer &layer = model.layers[size_t(l)];
        if (layer.experts > b.expert_columns)
            return fail(PIPPIN_BAD_ARGUMENT, "masks of %lld experts, layer %lld has %d", Wide(b.expert_columns), Wide(l),
                        layer.experts);
        for (int64_t s = 0; layer.experts && s < b.sequences; ++s) {
            if (!b.experts[s]) continue;
            const float *given = b.experts[s] + l * b.expert_columns;
            const int64_t left = std::count_if(given, given + layer.experts, [](float weight) { return weight != 0.f; });
            if (left < layer.active)
                return fail(PIPPIN_BAD_ARGUMENT, "a mask leaves %lld experts in layer %lld, a token takes %d", Wide(left),
                            Wide(l), layer.active);
        }
    }
    for (int64_t i = 0; i < b.observations; ++i) {
        const pippin_observed &seen = b.observed[i];
        if (!seen.received || seen.sequence < 0 || seen.sequence >= b.sequences ||
            seen.stride < longest_head(model, b, seen.sequence))
            return fail(PIPPIN_BAD_ARGUMENT, "an observation of sequence %d with %lld columns", seen.sequence,
                        Wide(seen.stride));
    }
    return PIPPIN_OK;
}

} // namespace

int check_batch(const pippin_model &model, const Ropes &ropes, const void *pool, int64_t blocks, int cache,
                const pippin_batch &b) {
    if (cache < PIPPIN_CACHE_F32 || cache > PIPPIN_CACHE_INT8)
        return fail(PIPPIN_BAD_ARGUMENT, "no such precision of the cache: %d", cache);
    if (!pool || reinterpret_cast<uintptr_t>(pool) % 64 || blocks < 1)
        return fail(PIPPIN_BAD_ARGUMENT, "a pool of %lld blocks at %p: it must begin at a multiple of 64 bytes",
                    Wide(blocks), pool);
    if (b.tokens < 1 || b.tokens > INT32_MAX || !b.ids)
        return fail(PIPPIN_BAD_ARGUMENT, "a pass over %lld tokens", Wide(b.tokens));
    if (int status = check_sequences(model, blocks, b)) return status;
    if (b.ragged)
        if (int status = check_ragged(model, blocks, cache, b)) return status;
    if (int status = check_wishes(model, b)) return status;
    if (int status = check_sight(model, b)) return status;
    if (int status = check_states(model, b)) return status;
    if (int status = check_extras(model, b)) return status;
    for (int64_t l = 0; !model.fetch && l < model.config.layers; ++l)
        if (model.layers[size_t(l)].fetched)
            return fail(PIPPIN_BAD_ARGUMENT, "layer %lld has experts that are in a file, and nothing fetches them", Wide(l));
    for (int64_t i = 0; (b.from == 0 || model.config.layer_table.rows) && i < b.tokens; ++i)
        if (b.ids[i] < 0 || b.ids[i] >= model.config.vocab)
            return fail(PIPPIN_BAD_ARGUMENT, "token %d is not in a vocabulary of %lld", b.ids[i],
                        Wide(model.config.vocab));
    for (int64_t t = 0; model.config.position.rows && b.from == 0 && b.axes && t < b.tokens; ++t)
        if (b.positions[t] >= model.config.position.rows)
            return fail(PIPPIN_BAD_ARGUMENT, "position %d of %lld", b.positions[t], Wide(model.config.position.rows));
    for (int64_t s = 0; model.config.position.rows && b.from == 0 && !b.axes && s < b.sequences; ++s)
        if (b.held[s] + int64_t(b.starts[s + 1]) - b.starts[s] > model.config.position.rows)
            return fail(PIPPIN_BAD_ARGUMENT, "sequence %lld is longer than the model's %lld positions", Wide(s),
                        Wide(model.config.position.rows));
    for (int32_t l = b.from; l < b.to; ++l) {
        const int32_t table = model.layers[size_t(l)].rope;
        if (table < 0) continue;
        const int64_t positions = ropes[size_t(table)] ? ropes[size_t(table)]->positions : 0;
        for (int64_t i = 0; i < b.axes * b.tokens; ++i)
            if (b.positions[i] >= positions)
                return fail(PIPPIN_BAD_ARGUMENT, "rotary table %d has %lld positions, and a token has position %d", table,
                            Wide(positions), b.positions[i]);
        for (int64_t s = 0; b.axes == 0 && s < b.sequences; ++s)
            if (b.held[s] + int64_t(b.starts[s + 1]) - b.starts[s] > positions)
                return fail(PIPPIN_BAD_ARGUMENT, "rotary table %d has %lld positions, and sequence %lld is longer",
                            table, Wide(positions), Wide(s));
    }
    return PIPPIN_OK;
}

} // namespace pippin

using namespace pippin;

extern "C" pippin_model *pippin_model_new(const pippin_config *config, const pippin_layer *layers) try {
    if (check_config(config, layers)) return nullptr;
    auto model = std::make_unique<pippin_model>();
    model->config = *config;
    model->layers.assign(layers, layers + config->layers);
    model->ropes.resize(size_t(config->rope_tables));
    model->rotary_dims.assign(config->rotary_dims, config->rotary_dims + config->rope_tables);
    std::vector<int32_t> sizes; // of each group
    int32_t cached = 0, states = 0;
    for (pippin_layer &layer : model->layers) {
        if (!layer.kv_heads) layer.kv_heads = int32_t(config->kv_heads);
        if (!layer.head_dim) layer.head_dim = int32_t(config->head_dim);
        model->experts.emplace_back(layer.expert, layer.expert + (layer.expert ? layer.experts : 0));
        model->latent.push_back(layer.latent ? *layer.latent : pippin_latent{});
        model->recurrent.push_back(layer.recurrent ? *layer.recurrent : pippin_recurrent{});
        model->states.push_back(layer.recurrent ? states++ : -1);
        if (!layer.q.rows) {
            model->heads_before.push_back(0), model->numbers_before.push_back(0), model->cached_index.push_back(-1);
            continue;
        }
        if (layer.source >= 0) {
            const size_t source = size_t(layer.source);
            layer.window = model->layers[source].window, layer.group = model->layers[source].group;
            model->heads_before.push_back(model->heads_before[source]);
            model->numbers_before.push_back(model->numbers_before[source]);
            model->cached_index.push_back(model->cached_index[source]);
            continue;
        }
        const size_t group = size_t(layer.group);
        if (group >= sizes.size()) {
            sizes.resize(group + 1), model->group_windows.resize(group + 1, -1);
            model->group_heads.resize(group + 1), model->group_numbers.resize(group + 1);
        }
        int32_t &window = model->group_windows[group];
        window = window < 0 || window == layer.window ? layer.window : 0;
        ++sizes[group];
        model->heads_before.push_back(model->group_heads[group]);
        model->numbers_before.push_back(model->group_numbers[group]);
        model->group_heads[group] += layer.kv_heads;
        model->group_numbers[group] += int64_t(layer.kv_heads) * layer.head_dim;
        model->cached_index.push_back(cached++);
    }
    if (sizes.empty()) model->group_windows.push_back(0); // nobody attends; tables are checked all the same
    if (std::count(sizes.begin(), sizes.end(), 0)) {
        fail(PIPPIN_BAD_ARGUMENT, "a group of layers is empty");
        return nullptr;
    }
    return model.release();
} catch (const std::bad_alloc &) {
    fail(PIPPIN_NO_MEMORY, "no memory for the description of a model");
    return nullptr;
}

extern "C" int pippin_model_fetch(pippin_model *model, pippin_fetch fetch, void *context, int32_t depth) {
    if (!model || depth < 0 || (depth && !fetch)) return fail(PIPPIN_BAD_ARGUMENT, "no model, or a depth of %d", depth);
    model->fetch = fetch, model->fetch_context = context, model->fetch_depth = depth;
    return PIPPIN_OK;
}

extern "C" int pippin_model_expert(pippin_model *model, int32_t layer, int32_t expert, const pippin_expert *place) {
    if (!model || layer < 0 || size_t(layer) >= model->experts.size() || expert < 0 ||
        size_t(expert) >= model->experts[size_t(layer)].size())
        return fail(PIPPIN_BAD_ARGUMENT, "no expert %d in layer %d", expert, layer);
    pippin_expert &own = model->experts[size_t(layer)][size_t(expert)];
    if (!model->layers[size_t(layer)].fetched) return fail(PIPPIN_BAD_ARGUMENT, "layer %d has its experts", layer);
    if (!place) {
        own.gate.data = own.up.data = own.down.data = nullptr;
        return PIPPIN_OK;
    }
    const std::pair<const pippin_matrix *, pippin_matrix *> parts[] = {
        {&place->gate, &own.gate}, {&place->up, &own.up}, {&place->down, &own.down}};
    for (const auto &[given, known] : parts)
        if (given->format != known->format || given->group != known->group || given->rows != known->rows ||
            given->columns != known->columns || (!given->data && given->rows) ||
            reinterpret_cast<uintptr_t>(given->data) % 64)
            return fail(PIPPIN_BAD_ARGUMENT, "expert %d of layer %d is not what the layer was described with", expert, layer);
    for (const auto &[given, known] : parts) known->data = given->data;
    return PIPPIN_OK;
}

extern "C" void pippin_model_free(pippin_model *model) { delete model; }

extern "C" int pippin_model_rope(pippin_model *model, int table, const float *cos, const float *sin,
                                 int64_t positions) try {
    if (!model || table < 0 || size_t(table) >= model->ropes.size())
        return fail(PIPPIN_BAD_ARGUMENT, "no rotary table %d", table);
    if (positions < 1 || positions > INT32_MAX || !cos || !sin)
        return fail(PIPPIN_BAD_ARGUMENT, "a rotary table of %lld positions", Wide(positions));
    auto rope = std::make_shared<Rope>();
    rope->half = model->rotary_dims[size_t(table)] / 2;
    const size_t count = size_t(positions * rope->half);
    rope->cos.assign(cos, cos + count);
    rope->sin.assign(sin, sin + count);
    rope->positions = positions;
    std::lock_guard<std::mutex> lock(model->mutex);
    if (model->ropes[size_t(table)]) rope->axes = model->ropes[size_t(table)]->axes;
    model->ropes[size_t(table)] = std::move(rope);
    return PIPPIN_OK;
} catch (const std::bad_alloc &) {
    return fail(PIPPIN_NO_MEMORY, "no memory for a rotary table of %lld positions", Wide(positions));
}

extern "C" int pippin_model_rope_axes(pippin_model *model, int table, const uint8_t *axes) try {
    if (!model || table < 0 || size_t(table) >= model->ropes.size() || !axes)
        return fail(PIPPIN_BAD_ARGUMENT, "no rotary table %d, or no axes", table);
    const int64_t half = model->rotary_dims[size_t(table)] / 2;
    for (int64_t i = 0; i < half; ++i)
        if (axes[i] > 3) return fail(PIPPIN_BAD_ARGUMENT, "a frequency rotates by axis %d", axes[i]);
    std::lock_guard<std::mutex> lock(model->mutex);
    auto rope = model->ropes[size_t(table)] ? std::make_shared<Rope>(*model->ropes[size_t(table)]) : std::make_shared<Rope>();
    rope->axes.assign(axes, axes + half);
    model->ropes[size_t(table)] = std::move(rope);
    return PIPPIN_OK;
} catch (const std::bad_alloc &) {
    return fail(PIPPIN_NO_MEMORY, "no memory for the axes of a rotary table");
}

extern "C" int64_t pippin_block_bytes(const pippin_model *model, int cache) {
    if (!model || cache < PIPPIN_CACHE_F32 || cache > PIPPIN_CACHE_INT8)
        return fail(PIPPIN_BAD_ARGUMENT, "no model, or no such precision of the cache: %d", cache);
    return model->block_bytes(cache);
}
