/* Mixtures of experts in a pass.
 *
 * Notable here:
 * - the tokens of each expert go through it together, and all experts of a layer are one region of work for the threads
 * - a token's sum is formed in the order of its experts, whatever the other tokens chose
 */
#include "pass.h"

#include <cmath>

namespace pippin {

/* The weights of one token's experts, from the router's outputs: -1 for those that it does not take. given: multipliers
 * on the weights, 0 for an expert that must not be taken; or NULL. choice and taken are room for as many numbers. */
void Pass::choose(const pippin_layer &layer, const float *given, float *routes, float *choice, uint8_t *taken) const {
    const pippin_router &router = layer.router;
    const int64_t experts = layer.experts;
    const auto best = [&](int64_t from, int64_t to) { // of equals the first
        int64_t found = -1;
        for (int64_t e = from; e < to; ++e)
            if (!taken[e] && (found < 0 || choice[e] > choice[found])) found = e;
        return found;
    };
    for (int64_t e = 0; router.bias && e < experts; ++e) routes[e] += router.bias[e];
    if (router.softcap > 0.f) step_.bound(routes, router.softcap, experts);
    for (int64_t e = 0; given && e < experts; ++e)
        if (given[e] == 0.f) routes[e] = -INFINITY;
    const auto weigh = [&] {
        for (int64_t e = 0; given && e < experts; ++e)
            if (taken[e]) routes[e] *= given[e];
    };
    memset(taken, 0, size_t(experts));
    if (router.scores == PIPPIN_SPARSEMIXER) return mix_sparsely(layer, routes, choice, taken), weigh();
    if (router.scores == PIPPIN_SOFTMAX) step_.softmax(routes, experts);
    else
        for (int64_t e = 0; e < experts; ++e) routes[e] = 1.f / (1.f + std::exp(-routes[e]));
    for (int64_t e = 0; e < experts; ++e)
        choice[e] = given && given[e] == 0.f ? -INFINITY : router.choice_bias ? routes[e] + router.choice_bias[e] : routes[e];
    const int64_t size = experts / router.groups;
    if (router.active_groups < router.groups) {
        float values[kMostGroups];
        for (int64_t g = 0; g < router.groups; ++g) {
            const int64_t first = best(g * size, (g + 1) * size);
            values[g] = choice[first];
            if (!router.best_two) continue;
            taken[first] = 1;
            const int64_t second = best(g * size, (g + 1) * size);
            values[g] += second < 0 ? 0.f : choice[second];
            taken[first] = 0;
        }
        bool kept[kMostGroups] = {};
        for (int32_t n = 0; n < router.active_groups; ++n) {
            int64_t found = -1;
            for (int64_t g = 0; g < router.groups; ++g)
                if (!kept[g] && (found < 0 || values[g] > values[found])) found = g;
            kept[found] = true;
        }
        for (int64_t e = 0; e < experts; ++e)
            if (!kept[e / size]) choice[e] = -INFINITY;
    }
    float sum = 0;
    for (int32_t n = 0; n < layer.active; ++n) {
        const int64_t found = best(0, experts);
        taken[found] = 1;
        sum += routes[found];
    }
    const float factor = router.normalize ? router.scale / std::max(sum, 1e-20f) : router.scale;
    for (int64_t e = 0; e < experts; ++e) routes[e] = taken[e] ? routes[e] * factor : -1.f;
    weigh();
}

/* Each choice has its share of a softmax over the experts that were not taken before it and are nearly as good.
 * Source: Liu et al. 2023, arXiv:2310.00811. */
void Pass::mix_sparsely(const pippin_layer &layer, float *routes, float *weights, uint8_t *taken) const {
    const int64_t experts = layer.experts;
    std::fill(weights, weights + experts, -1.f);
    for (int32_t n = 0; n < layer.active; ++n) {
        int64_t best = -1;
        for (int64_t e = 0; e < experts; ++e)
            if (!taken[e] && (best < 0 || routes[e] > routes[best])) best = e;
        float sum = 0;
        for (int64_t e = 0; e < experts; ++e) {
            const float distance = (routes[best] - routes[e]) / std::max(std::fabs(routes[e]), routes[best]);
            if (!taken[e] && !(distance > 2 * layer.router.jitter)) sum += std::exp(routes[e] - routes[best]);
        }
        weights[best] = 1.f / sum;
        taken[best] = 1;
    }
    std::copy(weights, weights + experts, routes);
}

/* The router's outputs before its bias. */
void Pass::read_router(const pippin_layer &layer, int64_t count, const float *read, float *routes) {
    const int64_t experts = layer.experts, pieces = (experts + 15) / 16;
    if (layer.router.input_norm) {
        for (int64_t i = 0; i < count; ++i)
            step_.norm(read + i * c_.width, layer.router.input_norm, c_.eps, c_.width, row(answers_, i, c_.width));
        read = answers_; // which nobody needs yet
    }
    parallel(count * pieces, 4, [&](int64_t a, int64_t b, int) {
        for (int64_t item = a; item < b; ++item) {
            const int64_t i = item / pieces, first = item % pieces * 16, some = std::min<int64_t>(16, experts - first);
            step_.dense(layer.router.weight + first * c_.width, some, c_.width, read + i * c_.width,
                        row(routes, i, experts) + first, false);
        }
    });
}

/* The multipliers on the weights of a layer's experts that were given with a token's sequence; or NULL. */
const float *Pass::given_weights(int32_t index, int64_t token) const {
    const float *given = b_.experts ? b_.experts[sequence_[token]] : nullptr;
    return given ? given + index * b_.expert_columns : nullptr;
}

/* The experts of the group's tokens, and the runs of tokens that share one. */
void Pass::route(const pippin_layer &layer, int32_t index, int64_t from, int64_t count, const float *read) {
    const int64_t experts = layer.experts;
    read_router(layer, count, read, routes_);
    parallel(count, 8, [&](int64_t a, int64_t b, int) {
        for (int64_t i = a; i < b; ++i) {
            choose(layer, given_weights(index, from + i), row(routes_, i, experts), row(choice_, i, experts),
                   taken_ + i * experts);
        }
    });
    runs_.clear();
    int32_t rows = 0;
    for (int64_t e = 0; e < experts; ++e) {
        const int32_t begin = rows;
        for (int64_t i = 0; i < count; ++i)
            if (taken_[i * experts + e]) source_[rows++] = int32_t(i);
        if (rows > begin) runs_.push_back({int32_t(e), begin, rows - begin, 0});
    }
}

/* The products of every run with matrices of its expert: gate and up, or down. make(row) writes a row of x just before it
 * is read. */
template <class Make>
void Pass::expert_products(int32_t index, bool down, const float *x, const Make &make) {
    const std::vector<pippin_expert> &experts = m_.experts[size_t(index)];
    bool used[kActivationKinds] = {};
    int64_t panels = 0;
    const auto listed = [&](const Run &run, Product (&list)[2]) {
        const pippin_expert &expert = experts[size_t(run.expert)];
        const bool gated = expert.gate.rows;
        if (down) list[0] = {&expert.down, answers_ + run.begin * c_.width, expert.down_bias, -1};
        else list[0] = {&expert.up, (gated ? run_up_ : run_gate_) + run.begin * expert.up.rows, expert.up_bias, -1};
        if (!down && gated) list[1] = {&expert.gate, run_gate_ + run.begin * expert.gate.rows, expert.gate_bias, -1};
        return !down && gated ? 2 : 1;
    };
    for (Run &run : runs_) {
        Product list[2];
        const int some = listed(run, list);
        run.panels_before = panels;
        for (int i = 0; i < some; ++i) {
            used[int(activation_kind(list[i].weight->format))] = true;
            panels += panel_count(list[i].weight->rows);
        }
    }
    const auto prepare = [&](const Run &run, int kind, int64_t end) {
        const int64_t columns = down ? experts[size_t(run.expert)].down.columns : c_.width;
        const int64_t bytes = (activation_bytes(ActivationKind(kind), 1, (columns + 31) / 32 * 32) + 63) / 64 * 64;
        return kernel_.prepare(ActivationKind(kind), x + run.begin * columns, columns, run.count, columns,
                               run_prepared_[kind] + run.begin * bytes, 0, end);
    };
    parallel(int64_t(runs_.size()), 1, [&](int64_t a, int64_t b, int) {
        for (int64_t r = a; r < b; ++r) {
            const Run &run = runs_[size_t(r)];
            for (int64_t i = run.begin; i < run.begin + run.count; ++i) make(run, i);
            for (int kind = 0; kind < kActivationKinds; ++kind)
                if (used[kind]) prepare(run, kind, run.count);
        }
    });
    clock_.lap(REST);
    const int64_t chunk = std::max<int64_t>(2, std::min<int64_t>(chunk_of(panels, 2) & ~int64_t(1), 16));
    parallel(panels, chunk, [&](int64_t from, int64_t to, int) {
        size_t r = size_t(std::upper_bound(runs_.begin(), runs_.end(), from,
                                           [](int64_t at, const Run &run) { return at < run.panels_before; }) - runs_.begin());
        for (--r; r < runs_.size() && runs_[r].panels_before < to; ++r) {
            Product list[2];
            const int some = listed(runs_[r], list);
            int64_t first = runs_[r].panels_before;
            for (int i = 0; i < some; ++i) {
                const int64_t last = first + panel_count(list[i].weight->rows);
                if (from < last && to > first)
                    kernel_.matmul_panels(*list[i].weight, prepare(runs_[r], int(activation_kind(list[i].weight->format)), 0),
                                          std::max(from, first) - first, std::min(to, last) - first, list[i].y,
                                          list[i].weight->rows, list[i].bias);
                first = last;
            }
        }
    });
    clock_.lap(LINEAR);
}

/* The rows of all runs through their experts. */
void Pass::compute_runs(int32_t index) {
    const pippin_layer &layer = m_.layers[size_t(index)];
    const std::vector<pippin_expert> &experts = m_.experts[size_t(index)];
    const Activation activation{layer.activation, layer.limit, layer.xielu};
    expert_products(index, false, gathered_, [&](const Run &, int64_t i) {
        memcpy(row(gathered_, i, c_.width), row(normed_, source_[i], c_.width), size_t(c_.width) * sizeof(float));
    });
    // rows of a run begin at a multiple of its own expert's size: all experts of a layer are of one size
    expert_products(index, true, run_gate_, [&](const Run &run, int64_t i) {
        const pippin_expert &expert = experts[size_t(run.expert)];
        const int64_t size = expert.up.rows;
        step_.activate(activation, row(run_gate_, i, size), expert.gate.rows ? row(run_up_, i, size) : nullptr, size);
    });
}

/* The same in the waves in which the experts come. */
void Pass::fetch_runs(int32_t index) {
    const std::vector<Run> all = runs_;
    std::vector<int32_t> needed, wave(all.size());
    for (const Run &run : all) needed.push_back(run.expert);
    size_t computed = 0;
    for (int32_t count = int32_t(all.size());; count = 0) {
        const int32_t some = m_.fetch(m_.fetch_context, index, needed.data(), count, m_.fetch_depth ? predicted_ : nullptr,
                                      wave.data());
        if (some <= 0 || size_t(some) > all.size() - computed) {
            if (some || computed < all.size()) throw NotFetched();
            break;
        }
        runs_.clear();
        for (int32_t i = 0; i < some; ++i) {
            const auto found = std::lower_bound(all.begin(), all.end(), wave[size_t(i)],
                                                [](const Run &run, int32_t expert) { return run.expert < expert; });
            if (found == all.end() || found->expert != wave[size_t(i)] || needed[size_t(found - all.begin())] < 0 ||
                !m_.experts[size_t(index)][size_t(found->expert)].up.data)
                throw NotFetched();
            needed[size_t(found - all.begin())] = -1; // each comes once
            runs_.push_back(*found);
        }
        compute_runs(index);
        computed += size_t(some);
    }
    runs_ = all;
}

/* The experts that the next mixtures are likely to need, from the hidden states as they are before this one. */
void Pass::predict(int32_t index, int64_t from, int64_t count) {
    const int64_t columns = m_.layers[size_t(index)].experts;
    int32_t next = index + 1;
    for (int32_t ahead = 0; ahead < m_.fetch_depth; ++ahead, ++next) {
        float *likely = predicted_ + ahead * columns;
        std::fill(likely, likely + columns, -1.f);
        while (next < b_.to && !m_.layers[size_t(next)].experts) ++next;
        if (next >= b_.to) continue;
        const pippin_layer &layer = m_.layers[size_t(next)];
        if (layer.experts != columns) continue;
        // a router that reads hidden states has a norm of its own
        const bool plain = layer.experts_norm || !layer.feedforward_norm;
        for (int64_t i = 0; i < count; ++i) {
            const float *x = row(x_, from + i, c_.width);
            if (plain) memcpy(row(gathered_, i, c_.width), x, size_t(c_.width) * sizeof(float));
            else normalize(layer.feedforward_norm, layer.feedforward_norm_bias, x, row(gathered_, i, c_.width));
        }
        read_router(layer, count, gathered_, routes_);
        for (int64_t i = 0; i < count; ++i) {
            float *routes = row(routes_, i, columns);
            for (int64_t e = 0; e < columns; ++e)
                if (layer.router.bias) routes[e] += layer.router.bias[e];
            if (layer.router.softcap > 0.f) step_.bound(routes, layer.router.softcap, columns);
            const float *given = given_weights(next, from + i);
            for (int64_t e = 0; given && e < columns; ++e)
                if (given[e] == 0.f) routes[e] = -INFINITY;
            step_.softmax(routes, columns);
            for (int64_t e = 0; e < columns; ++e) likely[e] = std::max(likely[e], routes[e]);
        }
    }
}

/* A mixture: the tokens of each expert together, all experts in one region of work.
 * Source: Shazeer et al. 2017, arXiv:1701.06538; without dropped tokens as in MegaBlocks, arXiv:2211.15841. */
void Pass::experts(int32_t index, int64_t from, int64_t count, const float *routed_by) {
    const pippin_layer &layer = m_.layers[size_t(index)];
    if (m_.fetch_depth) predict(index, from, count);
    route(layer, index, from, count, routed_by);
    if (m_.fetch) fetch_runs(index);
    else compute_runs(index);
    std::fill(used_, used_ + count, 0);
    for (const Run &run : runs_) // in the order of the experts, whatever the other tokens chose
        for (int64_t i = run.begin; i < run.begin + run.count; ++i)
            rows_[source_[i] * layer.active + used_[source_[i]]++] = int32_t(i), expert_[i] = run.expert;
    parallel(count, 8, [&](int64_t a, int64_t b, int) {
        for (int64_t i = a; i < b; ++i) {
            float *y = row(y_, i, c_.width);
            memset(y, 0, size_t(c_.width) * sizeof(float));
            for (int32_t n = 0; n < used_[i]; ++n) {
                const int32_t answer = rows_[i * layer.active + n];
                const int32_t e = expert_[answer];
                const float scale = layer.router.expert_scale ? layer.router.expert_scale[e] : 1.f;
                step_.add(y, row(answers_, answer, c_.width), scale * row(routes_, i, layer.experts)[e], c_.width);
            }
        }
    });
    if (!layer.shared.up.rows) return;
    float *shared = answers_;
    inner(layer.shared, {layer.activation, 0.f, layer.xielu}, normed_, count, shared, -1, 0, [](int64_t) {});
    parallel(count, 8, [&](int64_t a, int64_t b, int) {
        for (int64_t i = a; i < b; ++i) {
            float open = 1.f;
            if (layer.shared_gate) {
                step_.dense(layer.shared_gate, 1, c_.width, row(normed_, i, c_.width), &open, false);
                open = 1.f / (1.f + std::exp(-open));
            }
            step_.add(row(y_, i, c_.width), row(shared, i, c_.width), open, c_.width);
        }
    });
}

} // namespace pippin
