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

} // namespace

Pass::Pass(const pippin_model &model, const Ropes &ropes, void *pool, int cache, const pippin_batch &batch)
    : m_(model), c_(model.config), b_(batch), ropes_(ropes), kernel_(kernels()), step_(kernel_.step) {
    const int64_t head = head_bytes(c_.head_dim, cache);
    cache_ = {static_cast<uint8_t *>(pool), m_.cached * c_.kv_heads * head, 0, head, cache, int(c_.kv_heads),
              int(c_.head_dim)};
    Cutter count{nullptr};
    lay_out(count);
    Cutter cutter{pass_memory.get(count.used)};
    lay_out(cutter);
}

void Pass::lay_out(Cutter &cutter) {
    const int64_t group = std::min(b_.tokens, GROUP), q = c_.heads * c_.head_dim, kv = c_.kv_heads * c_.head_dim;
    int64_t inner = 1, experts = 0, rank = 0;
    const auto widest = [&](const pippin_matrix &up) { inner = std::max(inner, up.rows); };
    for (int32_t l = b_.from; l < b_.to; ++l) {
        widest(m_.layers[size_t(l)].up);
        for (const pippin_expert &expert : m_.experts[size_t(l)]) widest(expert.up);
        experts = std::max(experts, int64_t(m_.layers[size_t(l)].experts));
    }
    for (int64_t s = 0; s < b_.shares; ++s)
        for (int64_t i = 0; i < 7 * c_.layers; ++i) rank = std::max(rank, b_.share[s].changes[i].rank);
    const int64_t columns = std::max({c_.width, q, inner});
    cutter.cut(origin_, b_.tokens);
    cutter.cut(slot_, b_.tokens);
    cutter.cut(visible_, b_.tokens);
    cutter.cut(sequence_, b_.tokens);
    cutter.cut(x_, b_.tokens * c_.width);
    cutter.cut(normed_, group * c_.width);
    cutter.cut(y_, group * c_.width);
    cutter.cut(q_, group * q);
    cutter.cut(k_, group * kv);
    cutter.cut(v_, group * kv);
    cutter.cut(read_, group * q);
    cutter.cut(gate_, group * inner);
    cutter.cut(up_, group * inner);
    cutter.cut(routes_, group * experts);
    cutter.cut(gathered_, experts ? group * c_.width : 0);
    cutter.cut(answers_, experts ? group * c_.width : 0);
    cutter.cut(chosen_, group);
    cutter.cut(low_, group * rank);
    for (int kind = 0; kind < kActivationKinds; ++kind)
        cutter.cut(prepared_[kind], activation_bytes(ActivationKind(kind), group, (columns + 31) / 32 * 32));
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
    if (b_.from > 0) {
        memcpy(x_, b_.residual, size_t(count_ * c_.width) * sizeof(float));
        return;
    }
    int64_t ids[64];
    for (int64_t t = 0; t < count_; t += 64) {
        const int64_t some = std::min<int64_t>(64, count_ - t);
        std::copy(b_.ids + t, b_.ids + t + some, ids);
        pippin_rows(&c_.embedding, ids, some, row(x_, t, c_.width));
    }
    if (c_.embedding_scale != 1.f) step_.multiply(x_, c_.embedding_scale, count_ * c_.width);
    for (int64_t i = 0; i < b_.givens; ++i)
        memcpy(row(x_, b_.given[i].begin, c_.width), b_.given[i].rows,
               size_t(b_.given[i].count * c_.width) * sizeof(float));
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
        memmove(row(x_, i, c_.width), row(x_, from, c_.width), size_t(c_.width) * sizeof(float));
    }
    count_ = b_.outputs;
}

/* Add an adapter's change of a product, for the tokens that it works on. */
void Pass::adapt(const Product &product, const float *x, int64_t count, int32_t layer, int64_t from) {
    for (int64_t s = 0; s < b_.shares; ++s) {
        const pippin_change &change = b_.share[s].changes[7 * layer + product.change];
        if (change.rank == 0) continue;
        const int32_t *first = origin_ + from, *last = first + count;
        const int64_t begin = std::lower_bound(first, last, b_.share[s].begin) - first;
        const int64_t end = std::lower_bound(first, last, b_.share[s].end) - first;
        parallel(end - begin, 4, [&](int64_t a, int64_t b, int) {
            for (int64_t token = begin + a; token < begin + b; ++token) {
                float *low = low_ + token * change.rank;
                step_.dense(change.down, change.rank, change.inputs, x + token * change.inputs, low, false);
                step_.dense(change.up, change.outputs, change.rank, low, product.y + token * change.outputs, true);
            }
        });
    }
}

/* Cosines and sines of one token, gathered from its positions. */
void Pass::rotate(const pippin_layer &layer, int64_t token, float *cos, float *sin) const {
    const Rope &rope = *ropes_[size_t(layer.rope)];
    const int64_t half = c_.head_dim / 2;
    for (int64_t i = 0; i < half; ++i) {
        const int64_t axis = rope.axes.empty() || b_.axes == 1 ? 0 : rope.axes[size_t(i)];
        const int64_t position = b_.positions[axis * b_.tokens + origin_[token]];
        cos[i] = rope.cos[size_t(position * half + i)], sin[i] = rope.sin[size_t(position * half + i)];
    }
}

/* Norms on heads, and rotation, of the group's queries and keys. */
void Pass::turn(const pippin_layer &layer, int32_t index, int64_t from, int64_t to, bool queries, bool keys) {
    const int64_t half = c_.head_dim / 2, q = c_.heads * c_.head_dim, kv = c_.kv_heads * c_.head_dim;
    const Rope *rope = layer.rope < 0 ? nullptr : ropes_[size_t(layer.rope)].get();
    Cache cache = cache_;
    cache.offset = m_.slots[size_t(index)] * c_.kv_heads * cache.head_bytes;
    parallel(to - from, PIPPIN_BLOCK, [&](int64_t a, int64_t b, int) {
        for (int64_t i = a; i < b; ++i) {
            const int64_t slot = slot_[from + i];
            const float *cos = rope ? rope->cos.data() + slot * half : nullptr;
            const float *sin = rope ? rope->sin.data() + slot * half : nullptr;
            float gathered[2][256]; // heads have at most 512 dimensions
            if (rope && b_.axes) {
                rotate(layer, from + i, gathered[0], gathered[1]);
                cos = gathered[0], sin = gathered[1];
            }
            if (queries) step_.heads(q_ + i * q, c_.heads, c_.head_dim, layer.q_norm, c_.eps, cos, sin);
            if (!keys) continue;
            step_.heads(k_ + i * kv, c_.kv_heads, c_.head_dim, layer.k_norm, c_.eps, cos, sin);
            const int32_t block = table(layer, sequence_[from + i])[slot / PIPPIN_BLOCK];
            step_.keep(cache, block, int(slot % PIPPIN_BLOCK), k_ + i * kv, v_ + i * kv);
        }
    });
}

/* The keys and values of a layer after which only some tokens are left. */
void Pass::keys_and_values(int32_t index, int64_t from, int64_t to) {
    const pippin_layer &layer = m_.layers[size_t(index)];
    const Product k{&layer.k, k_, layer.k_bias, 1}, v{&layer.v, v_, layer.v_bias, 2};
    products(normed_, c_.width, to - from, {k, v}, [&](int64_t i) {
        step_.norm(row(x_, from + i, c_.width), layer.attention_norm, c_.eps, c_.width, row(normed_, i, c_.width));
        steer(PIPPIN_SITES * index, from + i, row(normed_, i, c_.width));
    });
    adapt(k, normed_, to - from, index, from);
    adapt(v, normed_, to - from, index, from);
    turn(layer, index, from, to, false, true);
}

void Pass::attention(int32_t index, int64_t from, int64_t to, bool own) {
    const pippin_layer &layer = m_.layers[size_t(index)];
    const int64_t count = to - from;
    const auto norm = [&](int64_t i) {
        step_.norm(row(x_, from + i, c_.width), layer.attention_norm, c_.eps, c_.width, row(normed_, i, c_.width));
        steer(PIPPIN_SITES * index, from + i, row(normed_, i, c_.width));
    };
    const Product q{&layer.q, q_, layer.q_bias, 0}, k{&layer.k, k_, layer.k_bias, 1}, v{&layer.v, v_, layer.v_bias, 2};
    if (own) {
        products(normed_, c_.width, count, {q, k, v}, norm);
        adapt(k, normed_, count, index, from);
        adapt(v, normed_, count, index, from);
    } else {
        products(normed_, c_.width, count, {q}, norm);
    }
    adapt(q, normed_, count, index, from);
    turn(layer, index, from, to, true, own);
    clock_.lap(REST);
    attend(layer, m_.slots[size_t(index)], from, to);
    if (b_.observations) observe(index, from, to);
    clock_.lap(ATTENTION);
    const Product output{&layer.output, y_, layer.output_bias, 3};
    products(read_, c_.heads * c_.head_dim, count, {output}, [](int64_t) {});
    adapt(output, read_, count, index, from);
    add_back(layer.post_attention_norm, PIPPIN_SITES * index + 1, from, to);
}

/* x += y of the group, normalized first where there is such a norm. */
void Pass::add_back(const float *post_norm, int64_t site, int64_t from, int64_t to) {
    parallel(to - from, 32, [&](int64_t a, int64_t b, int) {
        for (int64_t i = a; i < b; ++i) {
            float *y = row(y_, i, c_.width);
            if (post_norm) {
                step_.norm(y, post_norm, c_.eps, c_.width, y);
                steer(site, from + i, y);
            }
            step_.add(row(x_, from + i, c_.width), y, 1.f, c_.width);
        }
    });
}

/* y = down(act(gate x) * up x); adapters' changes unless the layer's index is -1. */
template <class Make>
void Pass::inner(const pippin_matrix &gate, const pippin_matrix &up, const pippin_matrix &down, int activation,
                 const float *x, int64_t count, float *y, int32_t index, int64_t from, const Make &make) {
    const int64_t size = up.rows;
    const Product g{&gate, gate_, nullptr, 4}, u{&up, gate.rows ? up_ : gate_, nullptr, 5}, d{&down, y, nullptr, 6};
    if (gate.rows) products(x, c_.width, count, {g, u}, make);
    else products(x, c_.width, count, {u}, make);
    if (index >= 0) {
        if (gate.rows) adapt(g, x, count, index, from);
        adapt(u, x, count, index, from);
    }
    products(gate_, size, count, {d}, [&](int64_t i) {
        step_.activate(activation, row(gate_, i, size), gate.rows ? row(up_, i, size) : nullptr, size);
    });
    if (index >= 0) adapt(d, gate_, count, index, from);
}

void Pass::feed_forward(int32_t index, int64_t from, int64_t to) {
    const pippin_layer &layer = m_.layers[size_t(index)];
    const auto norm = [&](int64_t i) {
        step_.norm(row(x_, from + i, c_.width), layer.feedforward_norm, c_.eps, c_.width, row(normed_, i, c_.width));
        steer(PIPPIN_SITES * index + 2, from + i, row(normed_, i, c_.width));
    };
    if (layer.experts) {
        for (int64_t i = 0; i < to - from; ++i) norm(i);
        experts(index, from, to - from);
    } else {
        inner(layer.gate, layer.up, layer.down, layer.activation, normed_, to - from, y_, index, from, norm);
    }
    add_back(layer.post_feedforward_norm, PIPPIN_SITES * index + 3, from, to);
    steer_all(PIPPIN_SITES * index + 4, from, to);
}

/* A mixture: each expert sees the tokens that chose it, in the order of the experts.
 * Source: Shazeer et al. 2017, arXiv:1701.06538; without dropped tokens as in MegaBlocks, arXiv:2211.15841. */
void Pass::experts(int32_t index, int64_t from, int64_t count) {
    const pippin_layer &layer = m_.layers[size_t(index)];
    const int64_t experts = layer.experts;
    for (int64_t i = 0; i < count; ++i) {
        float *routes = row(routes_, i, experts);
        step_.dense(layer.router, experts, c_.width, row(normed_, i, c_.width), routes, false);
        const uint8_t *mask = b_.experts ? b_.experts[sequence_[from + i]] : nullptr;
        const auto masked = [&](float value) {
            for (int64_t e = 0; mask && e < experts; ++e)
                if (!mask[index * b_.expert_columns + e]) routes[e] = value;
        };
        masked(-INFINITY);
        step_.softmax(routes, experts);
        masked(-1.f);
        // all but the `active` largest become -1; of equals the first counts
        float sum = 0;
        std::vector<bool> keep(size_t(experts), false);
        for (int32_t n = 0; n < layer.active; ++n) {
            int64_t best = -1;
            for (int64_t e = 0; e < experts; ++e)
                if (!keep[size_t(e)] && (best < 0 || routes[e] > routes[best])) best = e;
            keep[size_t(best)] = true;
            sum += routes[best];
        }
        for (int64_t e = 0; e < experts; ++e)
            routes[e] = !keep[size_t(e)] ? -1.f : layer.renormalize ? routes[e] / sum : routes[e];
    }
    memset(y_, 0, size_t(count * c_.width) * sizeof(float));
    for (int64_t e = 0; e < experts; ++e) {
        int64_t some = 0;
        for (int64_t i = 0; i < count; ++i) {
            if (row(routes_, i, experts)[e] < 0) continue;
            memcpy(row(gathered_, some, c_.width), row(normed_, i, c_.width), size_t(c_.width) * sizeof(float));
            chosen_[some++] = int32_t(i);
        }
        if (some == 0) continue;
        const pippin_expert &expert = m_.experts[size_t(index)][size_t(e)];
        inner(expert.gate, expert.up, expert.down, layer.activation, gathered_, some, answers_, -1, 0, [](int64_t) {});
        for (int64_t i = 0; i < some; ++i)
            step_.add(row(y_, chosen_[i], c_.width), row(answers_, i, c_.width), row(routes_, chosen_[i], experts)[e],
                      c_.width);
    }
}

/* One layer over all tokens that are left. narrow: only the wanted ones after its keys. */
void Pass::layer(int32_t index, bool narrow) {
    const bool own = m_.layers[size_t(index)].source < 0;
    if (narrow && own && count_ != b_.outputs) {
        for (int64_t from = 0; from < count_; from += GROUP)
            keys_and_values(index, from, std::min(from + GROUP, count_));
        keep_only_rows();
        for (int64_t from = 0; from < count_; from += GROUP)
            attention(index, from, std::min(from + GROUP, count_), false);
    } else {
        if (narrow) keep_only_rows();
        for (int64_t from = 0; from < count_; from += GROUP) attention(index, from, std::min(from + GROUP, count_), own);
    }
    for (int64_t from = 0; from < count_; from += GROUP) feed_forward(index, from, std::min(from + GROUP, count_));
    clock_.lap(REST);
}

/* Final norm and head of the wanted tokens. */
void Pass::finish() {
    keep_only_rows();
    if (b_.before_norm) memcpy(b_.before_norm, x_, size_t(count_ * c_.width) * sizeof(float));
    for (int64_t from = 0; from < count_; from += GROUP) {
        const int64_t to = std::min(from + GROUP, count_);
        float *hidden = b_.hidden ? row(b_.hidden, from, c_.width) : normed_;
        const auto norm = [&](int64_t i) {
            step_.norm(row(x_, from + i, c_.width), m_.config.final_norm, c_.eps, c_.width, row(hidden, i, c_.width));
            steer(PIPPIN_SITES * c_.layers, from + i, row(hidden, i, c_.width));
        };
        if (b_.logits)
            products(hidden, c_.width, to - from, {{&c_.head, row(b_.logits, from, c_.vocab), nullptr, -1}}, norm);
        else
            for (int64_t i = 0; i < to - from; ++i) norm(i);
    }
    clock_.lap(REST);
}

int Pass::run() {
    expect_regions();
    begin();
    const bool residual = b_.to < c_.layers && b_.residual;
    int32_t last = b_.from; // the last layer with keys of its own, or the first of all
    for (int32_t index = b_.from; index < b_.to; ++index)
        if (m_.layers[size_t(index)].source < 0) last = index;
    for (int32_t index = b_.from; index < b_.to; ++index) layer(index, !residual && !b_.observations && index >= last);
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
} catch (const std::bad_alloc &) {
    return fail(PIPPIN_NO_MEMORY, "no memory to compute a pass of %lld tokens", static_cast<long long>(batch->tokens));
}
