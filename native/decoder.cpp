/* One pass of a decoder over the new tokens of several sequences.
 *
 * Notable here:
 * - tokens go through a layer in groups that stay in the second-level cache, whatever the length of the pass
 * - keys and values are written to the cache before attention reads them, so that old and new tokens see the same
 * - after the last layer with keys of its own, only the tokens whose results are wanted are left
 * - every step on a token is independent of the other tokens: groups, threads and company never change a bit
 */
#include "pass.h"

#include <cmath>

namespace pippin {
namespace {

thread_local Memory pass_memory;

/* Norm and rotation of one token's heads. */
void turn_heads(const StepKernels &step, int kind, const float *weight, float eps, float *x, int64_t heads, int64_t head_dim,
                const float *cos, const float *sin) {
    if (weight && kind == PIPPIN_NORM_ALL_HEADS) {
        step.norm(x, weight, eps, heads * head_dim, x);
        weight = nullptr;
    }
    if (kind != PIPPIN_NORM_ROTATED_HEADS) return step.heads(x, heads, head_dim, weight, eps, cos, sin);
    step.heads(x, heads, head_dim, nullptr, eps, cos, sin);
    step.heads(x, heads, head_dim, weight, eps, nullptr, nullptr);
}

} // namespace

Pass::Pass(const pippin_model &model, const Ropes &ropes, void *pool, int cache, const pippin_batch &batch)
    : m_(model), c_(model.config), b_(batch), ropes_(ropes), kernel_(kernels()), step_(kernel_.step),
      group_(model.fetch ? std::max<int64_t>(batch.tokens, 1) : GROUP) {
    pool_ = {static_cast<uint8_t *>(pool), m_.block_bytes(cache), 0, 0, cache, 0, 0};
    Cutter count{nullptr};
    lay_out(count);
    Cutter cutter{pass_memory.get(count.used)};
    lay_out(cutter);
}

void Pass::lay_out(Cutter &cutter) {
    const int64_t group = std::min(b_.tokens, group_);
    int64_t q = 0, kv = 0;
    int64_t inner = 1, run_inner = 0, experts = 0, active = 0, rank = 0;
    int64_t entered = 0, mixed = 0, recurred = 0, low = 0;
    int64_t opened = 0, low_q = 0, head_columns = 0;
    bool parallel_parts = false, beside = false, branches = false;
    for (int32_t l = b_.from; l < b_.to; ++l) {
        const pippin_layer &layer = m_.layers[size_t(l)];
        inner = std::max({inner, layer.up.rows, layer.shared.up.rows, layer.input_gate.rows});
        q = std::max(q, c_.heads * layer.head_dim), kv = std::max(kv, int64_t(layer.kv_heads) * layer.head_dim);
        branches = branches || layer.experts_norm;
        for (const pippin_expert &expert : m_.experts[size_t(l)]) run_inner = std::max(run_inner, expert.up.rows);
        experts = std::max(experts, int64_t(layer.experts));
        active = std::max(active, int64_t(layer.active));
        parallel_parts = parallel_parts || layer.parallel;
        if (layer.attention_gate.rows) opened = std::max(opened, c_.heads * layer.head_dim);
        if (layer.latent) {
            const pippin_latent &latent = m_.latent[size_t(l)];
            opened = std::max(opened, c_.heads * std::max(latent.plain_dim + latent.rotated_dim, latent.value_dim));
            low_q = std::max(low_q, latent.q_a.rows);
            head_columns = std::max<int64_t>(head_columns, std::max(latent.plain_dim, latent.kv_rank));
        }
        if (!layer.recurrent) continue;
        const pippin_recurrent &recurrent = m_.recurrent[size_t(l)];
        const int64_t values = int64_t(recurrent.heads) * recurrent.value_dim;
        entered = std::max(entered, entered_columns(recurrent));
        mixed = std::max(mixed, values + 2 * int64_t(recurrent.groups) * recurrent.key_dim);
        recurred = std::max(recurred, values);
        low = std::max(low, recurrent.in[6].rows ? 2 * recurrent.in[4].rows : 0);
        beside = beside || layer.q.rows;
    }
    for (int64_t s = 0; s < b_.shares; ++s)
        for (int64_t i = 0; i < PIPPIN_CHANGES * c_.layers; ++i) rank = std::max(rank, b_.share[s].changes[i].rank);
    cutter.cut(layer_row_, c_.layer_table.rows ? c_.layer_table.columns : 0);
    const int64_t columns = std::max({c_.width, q, inner, recurred, low, opened, low_q}), runs = group * active;
    const int64_t run_columns = std::max(c_.width, run_inner);
    cutter.cut(origin_, b_.tokens);
    cutter.cut(slot_, b_.tokens);
    cutter.cut(visible_, b_.tokens);
    cutter.cut(sequence_, b_.tokens);
    cutter.cut(x_, b_.tokens * c_.width);
    cutter.cut(shared_, c_.tracks ? b_.tokens * c_.width : 0);
    cutter.cut(total_, c_.tracks ? b_.tokens * c_.width : 0);
    cutter.cut(normed_, group * c_.width);
    cutter.cut(y_, group * c_.width);
    cutter.cut(held_, parallel_parts || branches ? group * c_.width : 0);
    cutter.cut(layer_inputs_, b_.tokens * (c_.layer_table.rows ? c_.layer_table.columns : 0));
    cutter.cut(beside_, beside ? group * c_.width : 0);
    cutter.cut(entered_, group * entered);
    cutter.cut(mixed_, group * mixed);
    cutter.cut(recurred_, group * recurred);
    cutter.cut(low_gates_, group * low);
    cutter.cut(q_, group * q);
    cutter.cut(k_, group * kv);
    cutter.cut(v_, group * kv);
    cutter.cut(read_, group * q);
    cutter.cut(open_, group * opened);
    cutter.cut(low_q_, group * low_q);
    const int64_t head_bytes = activation_bytes(ActivationKind::BFloat16, group, head_columns);
    cutter.cut(head_prepared_, head_columns ? c_.heads * ((head_bytes + 63) / 64 * 64) : 0);
    cutter.cut(gate_, group * inner);
    cutter.cut(up_, group * inner);
    cutter.cut(predicted_, m_.fetch_depth * experts);
    cutter.cut(routes_, group * experts);
    cutter.cut(choice_, group * experts);
    cutter.cut(taken_, group * experts);
    cutter.cut(used_, experts ? group : 0);
    cutter.cut(gathered_, runs * c_.width);
    cutter.cut(answers_, runs * c_.width);
    cutter.cut(run_gate_, runs * run_inner);
    cutter.cut(run_up_, runs * run_inner);
    cutter.cut(source_, runs);
    cutter.cut(rows_, runs);
    cutter.cut(expert_, runs);
    cutter.cut(low_, group * rank);
    for (int kind = 0; kind < kActivationKinds; ++kind) {
        cutter.cut(prepared_[kind], activation_bytes(ActivationKind(kind), group, (columns + 31) / 32 * 32));
        const int64_t row = activation_bytes(ActivationKind(kind), 1, (run_columns + 31) / 32 * 32);
        cutter.cut(run_prepared_[kind], runs * ((row + 63) / 64 * 64));
    }
}

/* Where every token is, and what enters the first layer. */
void Pass::begin() {
    count_ = b_.tokens;
    for (int64_t s = 0; s < b_.sequences; ++s)
        for (int32_t t = b_.starts[s]; t < b_.starts[s + 1]; ++t) {
            origin_[t] = t;
            slot_[t] = b_.held[s] + (t - b_.starts[s]);
            visible_[t] = b_.visible ? b_.visible[t] : slot_[t];
            sequence_[t] = int32_t(s);
        }
    if (b_.from > 0 && !c_.layer_table.rows) {
        memcpy(x_, b_.residual, size_t(count_ * c_.width) * sizeof(float));
        return;
    }
    int64_t ids[64];
    for (int64_t t = 0; t < count_; t += 64) {
        const int64_t some = std::min<int64_t>(64, count_ - t);
        std::copy(b_.ids + t, b_.ids + t + some, ids);
        pippin_rows(&c_.embedding, ids, some, row(x_, t, c_.width));
    }
    for (int64_t t = 0; c_.embedding_norm && t < count_; ++t)
        step_.norm(row(x_, t, c_.width), c_.embedding_norm, c_.eps, c_.width, row(x_, t, c_.width));
    if (c_.embedding_scale != 1.f) step_.multiply(x_, c_.embedding_scale, count_ * c_.width);
    for (int64_t t = 0; c_.position.rows && t < count_; ++t) {
        const int64_t position = b_.axes ? b_.positions[t] : slot_[t];
        pippin_rows(&c_.position, &position, 1, normed_);
        step_.add(row(x_, t, c_.width), normed_, 1.f, c_.width);
    }
    if (c_.layer_table.rows) read_layer_inputs();
    if (b_.from > 0) memcpy(x_, b_.residual, size_t(count_ * c_.width) * sizeof(float));
    for (int64_t i = 0; i < b_.givens && b_.from == 0; ++i)
        memcpy(row(x_, b_.given[i].begin, c_.width), b_.given[i].rows,
               size_t(b_.given[i].count * c_.width) * sizeof(float));
}

/* The inputs that layers have beside the hidden states, of all tokens: Gemma 4. */
void Pass::read_layer_inputs() {
    const int64_t all = c_.layer_table.columns, size = all / c_.layers;
    const float scale = std::sqrt(float(size)), narrow = 1.f / std::sqrt(float(c_.width));
    for (int64_t from = 0; from < count_; from += group_) {
        const int64_t count = std::min(group_, count_ - from);
        const Product projection{&c_.layer_projection, layer_inputs_ + from * all, nullptr, -1};
        products(row(x_, from, c_.width), c_.width, count, {projection}, [](int64_t) {});
        parallel(count, 4, [&](int64_t a, int64_t b, int) {
            for (int64_t i = from + a; i < from + b; ++i) {
                float *inputs = layer_inputs_ + i * all;
                step_.multiply(inputs, narrow, all);
                for (int64_t l = 0; l < c_.layers; ++l)
                    step_.norm(inputs + l * size, c_.layer_input_norm, c_.eps, size, inputs + l * size);
            }
        });
        for (int64_t i = from; i < from + count; ++i) {
            const int64_t id = b_.ids[i];
            pippin_rows(&c_.layer_table, &id, 1, layer_row_);
            step_.add(layer_inputs_ + i * all, layer_row_, scale, all);
            step_.multiply(layer_inputs_ + i * all, std::sqrt(0.5f), all);
        }
    }
}

/* x += norm(projection(act(gate(x)) * input)) for the input of the layer, and the layer's own multiplier. */
void Pass::leave_layer(int32_t index, int64_t from, int64_t to) {
    const pippin_layer &layer = m_.layers[size_t(index)];
    const int64_t count = to - from, size = layer.input_gate.rows;
    float *x = row(x_, from, c_.width);
    if (size) {
        const Product gate{&layer.input_gate, gate_, nullptr, 9 + PIPPIN_INPUTS};
        const Product projection{&layer.input_projection, y_, nullptr, 10 + PIPPIN_INPUTS};
        products(x, c_.width, count, {gate}, [](int64_t) {});
        adapt(gate, x, count, index, from);
        products(gate_, size, count, {projection}, [&](int64_t i) {
            const float *input = layer_inputs_ + origin_[from + i] * c_.layer_table.columns + index * size;
            step_.activate({layer.activation, 0.f, layer.xielu}, row(gate_, i, size), input, size);
        });
        adapt(projection, gate_, count, index, from);
        for (int64_t i = 0; i < count; ++i) {
            float *y = row(y_, i, c_.width);
            step_.norm(y, layer.input_norm, c_.eps, c_.width, y);
            step_.add(row(x, i, c_.width), y, 1.f, c_.width);
        }
    }
    if (layer.scalar != 1.f) step_.multiply(x, layer.scalar, count * c_.width);
    steer_all(PIPPIN_SITES * index + 4, from, to);
}

/* Where the keys and values of a layer lie. */
Cache Pass::cache_of(int32_t index) const {
    const pippin_layer &layer = m_.layers[size_t(index)];
    Cache cache = pool_;
    cache.offset = heads_bytes(m_.heads_before[size_t(index)], m_.numbers_before[size_t(index)], cache.kind);
    cache.head_bytes = heads_bytes(1, layer.head_dim, cache.kind);
    cache.kv_heads = layer.kv_heads, cache.head_dim = layer.head_dim;
    return cache;
}

/* The norm of hidden states; y may be x. */
void Pass::normalize(const float *weight, const float *bias, const float *x, float *y) const {
    if (c_.norm == PIPPIN_LAYER_NORM) step_.layer_norm(x, weight, bias, c_.eps, c_.width, y);
    else step_.norm(x, weight, c_.eps, c_.width, y);
}

/* Change one token's hidden state at a site, if it is steered there. */
void Pass::steer(int64_t site, int64_t token, float *x) const {
    for (int64_t s = 0; s < b_.steerings; ++s) {
        const pippin_steering &steering = b_.steering[s];
        if (!steering.scale[site] || origin_[token] < steering.begin || origin_[token] >= steering.end) continue;
        for (int64_t i = 0; i < c_.width; ++i) x[i] = steering.scale[site][i] * x[i] + steering.shift[site][i];
    }
}

/* The same for tokens of the residual stream. */
void Pass::steer_all(int64_t site, int64_t from, int64_t to) {
    if (!b_.steerings) return;
    parallel(to - from, 32, [&](int64_t a, int64_t b, int) {
        for (int64_t i = from + a; i < from + b; ++i) steer(site, i, row(x_, i, c_.width));
    });
}

/* Go on with the tokens whose results are wanted. */
void Pass::keep_only_rows() {
    if (count_ == b_.outputs) return; // all of them
    for (int64_t i = 0; i < b_.outputs; ++i) { // rows ascend: nothing is overwritten that is still needed
        const int32_t from = b_.rows[i];
        origin_[i] = from, slot_[i] = slot_[from], visible_[i] = visible_[from], sequence_[i] = sequence_[from];
        for (float *states : {x_, c_.tracks ? shared_ : nullptr, c_.tracks ? total_ : nullptr})
            if (states) memmove(row(states, i, c_.width), row(states, from, c_.width), size_t(c_.width) * sizeof(float));
    }
    count_ = b_.outputs;
}

/* Add an adapter's change of a product, for the tokens that it works on. */
void Pass::adapt(const Product &product, const float *x, int64_t count, int32_t layer, int64_t from) {
    for (int64_t s = 0; s < b_.shares; ++s) {
        const pippin_change &change = b_.share[s].changes[PIPPIN_CHANGES * layer + product.change];
        if (change.rank == 0) continue;
        const int32_t *first = origin_ + from, *last = first + count;
        const int64_t begin = std::lower_bound(first, last, b_.share[s].begin) - first;
        const int64_t end = std::lower_bound(first, last, b_.share[s].end) - first;
        parallel(end - begin, 4, [&](int64_t a, int64_t b, int) {
            for (int64_t token = begin + a; token < begin + b; ++token) {
                float *low = low_ + token * change.rank;
                step_.dense(change.down, change.rank, change.inputs, x + token * change.inputs, low, false);
                step_.dense(change.up, change.outputs, change.rank, low, product.y + token * product.row(), true);
            }
        });
    }
}

/* Cosines and sines of one token: in the table, or gathered from its positions; nullptr if the layer rotates nothing. */
void Pass::rotation(const pippin_layer &layer, int64_t token, float (&gathered)[2][512], const float *&cos,
                    const float *&sin) const {
    cos = sin = nullptr;
    if (layer.rope < 0) return;
    const Rope &rope = *ropes_[size_t(layer.rope)];
    const int64_t half = rope.half;
    cos = gathered[0], sin = gathered[1];
    if (!b_.axes) {
        cos = rope.cos.data() + slot_[token] * half, sin = rope.sin.data() + slot_[token] * half;
        return;
    }
    for (int64_t i = 0; i < half; ++i) {
        const int64_t axis = rope.axes.empty() || b_.axes == 1 ? 0 : rope.axes[size_t(i)];
        const int64_t position = b_.positions[axis * b_.tokens + origin_[token]];
        gathered[0][i] = rope.cos[size_t(position * half + i)], gathered[1][i] = rope.sin[size_t(position * half + i)];
    }
}

/* Queries of one token that grow with its position. */
void Pass::scale_by_position(const pippin_layer &layer, int64_t token, float *q) const {
    if (layer.position_beta == 0.f) return;
    const int64_t position = b_.axes ? b_.positions[origin_[token]] : slot_[token];
    const float steps = float(position / layer.position_length);
    step_.multiply(q, 1.f + layer.position_beta * std::log1p(steps), c_.heads * layer.head_dim);
}

/* Norms on heads, and rotation, of the group's queries and keys. */
void Pass::turn(const pippin_layer &layer, int32_t index, int64_t from, int64_t to, bool queries, bool keys) {
    const int64_t q = c_.heads * layer.head_dim, kv = int64_t(layer.kv_heads) * layer.head_dim;
    const Cache cache = cache_of(index);
    parallel(to - from, PIPPIN_BLOCK, [&](int64_t a, int64_t b, int) {
        for (int64_t i = a; i < b; ++i) {
            float gathered[2][512]; // heads have at most 1024 dimensions
            const float *cos, *sin;
            rotation(layer, from + i, gathered, cos, sin);
            if (queries) {
                float *heads = q_ + i * q;
                turn_heads(step_, layer.qk_norm, layer.q_norm, c_.eps, heads, c_.heads, layer.head_dim, cos, sin);
                scale_by_position(layer, from + i, heads);
            }
            if (!keys) continue;
            float *values = v_ + i * kv;
            if (!layer.v.rows) memcpy(values, k_ + i * kv, size_t(kv) * sizeof(float));
            if (layer.v_norm) step_.heads(values, layer.kv_heads, layer.head_dim, layer.v_norm, c_.eps, nullptr, nullptr);
            turn_heads(step_, layer.qk_norm, layer.k_norm, c_.eps, k_ + i * kv, layer.kv_heads, layer.head_dim, cos, sin);
            const int64_t slot = slot_[from + i], sequence = sequence_[from + i];
            if (const pippin_ragged *apart = ragged(sequence)) {
                step_.keep_apart(cache, *apart, first_head(index), slot, k_ + i * kv, values);
                continue;
            }
            const int32_t block = table(layer, sequence)[slot / PIPPIN_BLOCK];
            step_.keep(cache, block, int(slot % PIPPIN_BLOCK), k_ + i * kv, values);
        }
    });
}

/* The keys and values of a layer, without its queries. */
void Pass::keys_and_values(int32_t index, int64_t from, int64_t to) {
    const pippin_layer &layer = m_.layers[size_t(index)];
    if (layer.latent) return latent_keys(index, from, to);
    const Product k{&layer.k, k_, layer.k_bias, 1}, v{&layer.v, v_, layer.v_bias, 2};
    const float *x = layer.attention_norm ? normed_ : row(x_, from, c_.width);
    const auto norm = [&](int64_t i) { normalize_input(index, layer, from + i, row(normed_, i, c_.width)); };
    if (layer.v.rows) products(x, c_.width, to - from, {k, v}, norm);
    else products(x, c_.width, to - from, {k}, norm);
    adapt(k, x, to - from, index, from);
    if (layer.v.rows) adapt(v, x, to - from, index, from);
    turn(layer, index, from, to, false, true);
}

/* What attention reads of one token, if it is not the hidden state itself. */
void Pass::normalize_input(int32_t index, const pippin_layer &layer, int64_t token, float *y) const {
    if (!layer.attention_norm) return;
    normalize(layer.attention_norm, layer.attention_norm_bias, row(x_, token, c_.width), y);
    steer(PIPPIN_SITES * index, token, y);
}

void Pass::attention(int32_t index, int64_t from, int64_t to, bool own, float *y) {
    const pippin_layer &layer = m_.layers[size_t(index)];
    if (layer.latent) return latent_attention(index, from, to, own, y);
    const int64_t count = to - from, wide = c_.heads * layer.head_dim;
    const float *x = layer.attention_norm ? normed_ : row(x_, from, c_.width);
    const auto norm = [&](int64_t i) { normalize_input(index, layer, from + i, row(normed_, i, c_.width)); };
    const Product q{&layer.q, q_, layer.q_bias, 0}, k{&layer.k, k_, layer.k_bias, 1}, v{&layer.v, v_, layer.v_bias, 2};
    const Product gate{&layer.attention_gate, open_, layer.attention_gate_bias, 7};
    const Product *list[4] = {&q};
    int64_t some = 1;
    if (layer.attention_gate.rows) list[some++] = &gate;
    if (own) list[some++] = &k;
    if (own && layer.v.rows) list[some++] = &v;
    products(x, c_.width, count, list, some, norm);
    for (int64_t i = 0; i < some; ++i) adapt(*list[i], x, count, index, from);
    turn(layer, index, from, to, true, own);
    clock_.lap(REST);
    attend(index, from, to);
    if (b_.observations) observe(index, from, to);
    clock_.lap(ATTENTION);
    const Product output{&layer.output, y, layer.output_bias, 3};
    products(read_, wide, count, {output}, [&](int64_t i) {
        if (layer.attention_gate.rows) step_.open(row(read_, i, wide), row(open_, i, wide), wide);
    });
    adapt(output, read_, count, index, from);
}

/* Attention, a recurrence, or the sum of both: added to the hidden states, or held where feed-forward goes beside. */
void Pass::mix(int32_t index, int64_t from, int64_t to, bool own) {
    const pippin_layer &layer = m_.layers[size_t(index)];
    float *y = layer.parallel ? held_ : y_;
    if (layer.q.rows) attention(index, from, to, own, y);
    if (layer.recurrent) recurrence(index, from, to, layer.q.rows ? beside_ : y);
    if (layer.q.rows && layer.recurrent) step_.add(y, beside_, 1.f, (to - from) * c_.width);
    if (!layer.parallel)
        add_back(layer.post_attention_norm, layer.post_attention_norm_bias, y, PIPPIN_SITES * index + 1, from, to);
}

/* x += y of the group: normalized where there is such a norm, else scaled. */
void Pass::add_back(const float *post_norm, const float *bias, float *y, int64_t site, int64_t from, int64_t to) {
    parallel(to - from, 32, [&](int64_t a, int64_t b, int) {
        for (int64_t i = a; i < b; ++i) {
            float *added = row(y, i, c_.width);
            if (post_norm) {
                normalize(post_norm, bias, added, added);
                steer(site, from + i, added);
            }
            step_.add(row(x_, from + i, c_.width), added, post_norm ? 1.f : c_.residual_scale, c_.width);
        }
    });
}

void Pass::feed_forward(int32_t index, int64_t from, int64_t to) {
    const pippin_layer &layer = m_.layers[size_t(index)];
    const int64_t count = to - from;
    const bool shares_norm = layer.parallel && !layer.feedforward_norm;
    const float *weight = shares_norm ? layer.attention_norm : layer.feedforward_norm;
    const float *bias = shares_norm ? layer.attention_norm_bias : layer.feedforward_norm_bias;
    const float *x = weight ? normed_ : row(x_, from, c_.width);
    const auto norm = [&](int64_t i) {
        if (!weight) return;
        normalize(weight, bias, row(x_, from + i, c_.width), row(normed_, i, c_.width));
        steer(PIPPIN_SITES * index + (shares_norm ? 0 : 2), from + i, row(normed_, i, c_.width));
    };
    if (layer.experts && !layer.experts_norm) {
        parallel(count, 8, [&](int64_t a, int64_t b, int) {
            for (int64_t i = a; i < b; ++i) {
                if (weight) norm(i);
                else memcpy(row(normed_, i, c_.width), row(x_, from + i, c_.width), size_t(c_.width) * sizeof(float));
            }
        });
        experts(index, from, count, normed_);
    } else {
        const pippin_expert dense{layer.gate, layer.up, layer.down, layer.gate_bias, layer.up_bias, layer.down_bias};
        inner(dense, {layer.activation, layer.limit, layer.xielu}, x, count, y_, index, from, norm);
    }
    if (layer.experts_norm) beside_dense(index, from, count);
    if (layer.parallel)
        for (int64_t i = 0; i < count; ++i) step_.add(row(held_, i, c_.width), row(y_, i, c_.width), 1.f, c_.width);
    add_back(layer.post_feedforward_norm, layer.post_feedforward_norm_bias, layer.parallel ? held_ : y_,
             PIPPIN_SITES * index + 3, from, to);
}

/* y = norm(y) + norm(experts(norm(x))) for a dense layer's outputs y: Gemma 4. */
void Pass::beside_dense(int32_t index, int64_t from, int64_t count) {
    const pippin_layer &layer = m_.layers[size_t(index)];
    const auto each = [&](const auto &work) {
        parallel(count, 8, [&](int64_t a, int64_t b, int) {
            for (int64_t i = a; i < b; ++i) work(i);
        });
    };
    each([&](int64_t i) {
        step_.norm(row(y_, i, c_.width), layer.post_dense_norm, c_.eps, c_.width, row(held_, i, c_.width));
        step_.norm(row(x_, from + i, c_.width), layer.experts_norm, c_.eps, c_.width, row(normed_, i, c_.width));
    });
    experts(index, from, count, row(x_, from, c_.width));
    each([&](int64_t i) {
        float *y = row(y_, i, c_.width);
        step_.norm(y, layer.post_experts_norm, c_.eps, c_.width, y);
        step_.add(y, row(held_, i, c_.width), 1.f, c_.width);
    });
}

/* One layer over all tokens that are left. narrow: only the wanted ones after its keys. */
void Pass::layer(int32_t index, bool narrow) {
    bool own = m_.layers[size_t(index)].source < 0;
    // a recurrence needs all tokens up to its outputs
    const bool recurs = m_.layers[size_t(index)].recurrent;
    const bool late = narrow && recurs;
    if (late) narrow = false;
    own = own && m_.layers[size_t(index)].q.rows;
    // keys first where some tokens need none but them, or see tokens that come after them
    if (own && ((narrow && count_ != b_.outputs) || (b_.visible && count_ > group_))) {
        for (int64_t from = 0; from < count_; from += group_)
            keys_and_values(index, from, std::min(from + group_, count_));
        own = false;
    }
    if (narrow) keep_only_rows();
    for (int64_t from = 0; from < count_; from += group_) {
        const int64_t to = std::min(from + group_, count_);
        if (m_.layers[size_t(index)].q.rows || recurs) mix(index, from, to, own);
        if (m_.layers[size_t(index)].up.rows || m_.layers[size_t(index)].experts) feed_forward(index, from, to);
        leave_layer(index, from, to);
    }
    if (late) keep_only_rows();
    clock_.lap(REST);
}

/* All tracks of a block begin with the same states. */
void Pass::enter_track(int32_t index) {
    if (!c_.tracks || index % c_.track_depth) return;
    const size_t bytes = size_t(count_ * c_.width) * sizeof(float);
    if (index % (c_.tracks * c_.track_depth)) memcpy(x_, shared_, bytes);
    else memcpy(shared_, x_, bytes);
}

/* Add what a track computed to what those before it did; after the last one, join them. */
void Pass::leave_track(int32_t index) {
    if (!c_.tracks || (index + 1) % c_.track_depth) return;
    const int32_t track = index / c_.track_depth % c_.tracks;
    const bool delta = c_.track_join == PIPPIN_JOIN_DELTA, last = track + 1 == c_.tracks;
    parallel(count_, 16, [&](int64_t begin, int64_t end, int) {
        const int64_t count = (end - begin) * c_.width;
        float *x = row(x_, begin, c_.width), *total = row(total_, begin, c_.width);
        const float *shared = row(shared_, begin, c_.width);
        if (delta) step_.add(x, shared, -1.f, count);
        if (track) step_.add(x, total, 1.f, count);
        if (!last) memcpy(total, x, size_t(count) * sizeof(float));
        else if (delta) step_.add(x, shared, 1.f, count);
        else if (c_.track_join == PIPPIN_JOIN_MEAN) step_.multiply(x, 1.f / float(c_.tracks), count);
    });
    clock_.lap(REST);
}

/* Final norm and head of the wanted tokens. */
void Pass::finish() {
    keep_only_rows();
    if (b_.before_norm) memcpy(b_.before_norm, x_, size_t(count_ * c_.width) * sizeof(float));
    for (int64_t from = 0; from < count_; from += group_) {
        const int64_t to = std::min(from + group_, count_);
        float *hidden = b_.hidden ? row(b_.hidden, from, c_.width) : normed_;
        const auto norm = [&](int64_t i) {
            normalize(c_.final_norm, c_.final_norm_bias, row(x_, from + i, c_.width), row(hidden, i, c_.width));
            steer(PIPPIN_SITES * c_.layers, from + i, row(hidden, i, c_.width));
        };
        if (b_.logits)
            products(hidden, c_.width, to - from, {{&c_.head, row(b_.logits, from, c_.vocab), c_.head_bias, -1}}, norm);
        else
            for (int64_t i = 0; i < to - from; ++i) norm(i);
    }
    const bool changed = c_.logit_scale != 1.f || c_.logit_softcap != 0.f;
    parallel(b_.logits && changed ? count_ * c_.vocab : 0, 1 << 14, [&](int64_t a, int64_t b, int) {
        if (c_.logit_scale != 1.f) step_.multiply(b_.logits + a, c_.logit_scale, b - a);
        if (c_.logit_softcap != 0.f) step_.bound(b_.logits + a, c_.logit_softcap, b - a);
    });
    clock_.lap(REST);
}

int Pass::run() {
    expect_regions();
    begin();
    const bool residual = b_.to < c_.layers && b_.residual;
    int32_t last = b_.from; // the last layer with keys of its own or a state, or the first of all
    for (int32_t index = b_.from; index < b_.to; ++index)
        if (m_.layers[size_t(index)].recurrent || (m_.layers[size_t(index)].q.rows && m_.layers[size_t(index)].source < 0))
            last = index;
    for (int32_t index = b_.from; index < b_.to; ++index) {
        enter_track(index);
        layer(index, !residual && !b_.observations && index >= last);
        leave_track(index);
    }
    if (residual) memcpy(b_.residual, x_, size_t(count_ * c_.width) * sizeof(float));
    finish();
    return PIPPIN_OK;
}

} // namespace pippin

using namespace pippin;

extern "C" int pippin_forward(const pippin_model *model, void *pool, int64_t blocks, int cache,
                              const pippin_batch *batch) try {
    if (!model || !batch) return fail(PIPPIN_BAD_ARGUMENT, "no model, or no batch");
    const Ropes ropes = model->tables();
    if (int status = check_batch(*model, ropes, pool, blocks, cache, *batch)) return status;
    const int status = Pass(*model, ropes, pool, cache, *batch).run();
    pass_memory.trim();
    return status;
} catch (const pippin::NotFetched &) {
    return fail(PIPPIN_NOT_FETCHED, "experts that were needed did not come");
} catch (const std::bad_alloc &) {
    return fail(PIPPIN_NO_MEMORY, "no memory to compute a pass of %lld tokens", static_cast<long long>(batch->tokens));
}
