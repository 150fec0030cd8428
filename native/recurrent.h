/* Recurrences that stand in place of attention. Included by kernels.cpp for each instruction set.
 *
 * Notable here:
 * - a head goes through its tokens one by one, with its memory in the nearest cache: no chunks, so the result is the same
 *   to the bit however a prompt is cut, and a prompt costs little beside the matrices of its layer
 * - the first token reads the state before the pass and writes the new one: nothing is copied
 */
#ifndef PIPPIN_RECURRENT_H
#define PIPPIN_RECURRENT_H

#include "ops.h"

namespace PIPPIN_NS {

using pippin::Recurrence;

constexpr int64_t MOST_KEYS = 1024; // dimensions of a key

PIPPIN_INLINE float softplus(float x) { return x > 20.f ? x : __builtin_log1pf(__builtin_expf(x)); }

static void convolve(const Recurrence &w, int64_t from, int64_t to) {
    const pippin_recurrent &layer = *w.layer;
    const int64_t kept = layer.taps - 1, channels = w.channels;
    const auto seen = [&](int64_t at) { // input `at` of those that are kept and the new ones; nullptr: zeros
        if (at >= kept) return w.entered + (at - kept) * w.entered_stride + w.conv_at;
        return w.before ? w.before + at * channels : nullptr;
    };
    const bool silu = layer.kind == PIPPIN_DELTA_RULE || layer.kind == PIPPIN_STATE_SPACE;
    for (int64_t t = 0; t < w.count; ++t) {
        float *y = w.mixed + t * channels;
        by_16(to - from, [&](int64_t i, int lanes) {
            const int64_t at = from + i;
            f32x16 sum = f32x16::zero();
            for (int64_t tap = 0; tap <= kept; ++tap)
                if (const float *u = seen(t + tap))
                    sum = fma(get(u + at, lanes), get(layer.conv + tap * channels + at, lanes), sum);
            if (layer.conv_bias) sum = sum + get(layer.conv_bias + at, lanes);
            put(silu ? sum * sigmoid(sum) : sum, y + at, lanes);
        });
    }
    for (int64_t j = 0; j < kept; ++j) { // in this order also where the state is changed in place
        const float *u = seen(w.count + j);
        float *kept_now = w.after + j * channels;
        by_16(to - from, [&](int64_t i, int lanes) {
            put(u ? get(u + from + i, lanes) : f32x16::zero(), kept_now + from + i, lanes);
        });
    }
}

/* x / |x|, times `scale`, with the epsilon of models that use the delta rule. */
PIPPIN_INLINE void unit(const float *x, int64_t n, float scale, float *y) {
    const f32x16 factor = f32x16::set1(scale / __builtin_sqrtf(dot_product(x, x, n) + 1e-6f));
    by_16(n, [&](int64_t at, int lanes) { put(get(x + at, lanes) * factor, y + at, lanes); });
}

/* S = diag(alpha) S + k w^T with w = beta (v - S^T diag(alpha) k), and y = S^T q, for 16 * VECTORS columns.
 * decayed_k and decayed_q are alpha times k and q. */
template <int VECTORS>
PIPPIN_INLINE void delta_columns(const float *before, float *after, int64_t rows, int64_t stride, const float *alpha,
                                 const float *k, const float *decayed_k, const float *decayed_q, float overlap, float beta,
                                 const float *v, float *y, int lanes) {
    f32x16 predicted[VECTORS], told[VECTORS];
    for (int j = 0; j < VECTORS; ++j) predicted[j] = told[j] = f32x16::zero();
    for (int64_t i = 0; before && i < rows; ++i)
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; ++j) {
            const f32x16 s = VECTORS > 1 ? f32x16::loadu(before + i * stride + 16 * j) : get(before + i * stride, lanes);
            predicted[j] = fma(f32x16::set1(decayed_k[i]), s, predicted[j]);
            told[j] = fma(f32x16::set1(decayed_q[i]), s, told[j]);
        }
    for (int j = 0; j < VECTORS; ++j) {
        const int n = VECTORS > 1 ? 16 : lanes;
        predicted[j] = f32x16::set1(beta) * (get(v + 16 * j, n) - predicted[j]);
        put(fma(f32x16::set1(overlap), predicted[j], told[j]), y + 16 * j, n);
    }
    for (int64_t i = 0; i < rows; ++i)
#pragma GCC unroll 4
        for (int j = 0; j < VECTORS; ++j) {
            f32x16 s = f32x16::zero();
            if (before) s = VECTORS > 1 ? f32x16::loadu(before + i * stride + 16 * j) : get(before + i * stride, lanes);
            s = fma(f32x16::set1(k[i]), predicted[j], f32x16::set1(alpha[i]) * s);
            if (VECTORS > 1) s.storeu(after + i * stride + 16 * j);
            else put(s, after + i * stride, lanes);
        }
}

/* Source: Yang et al. 2024, arXiv:2412.06464, eq. 10; by channels: Kimi Team 2025, arXiv:2510.26692, eq. 1. */
static void delta_rule(const Recurrence &w, int64_t head) {
    const pippin_recurrent &layer = *w.layer;
    const int64_t keys = layer.key_dim, values = layer.value_dim, size = keys * values;
    const int64_t shared = layer.tiled ? head % layer.groups : head / (layer.heads / layer.groups);
    const int64_t each = layer.decays / layer.heads;
    const int64_t memory = (layer.taps - 1) * w.channels + head * size;
    float q[MOST_KEYS], k[MOST_KEYS], alpha[MOST_KEYS], decayed_k[MOST_KEYS], decayed_q[MOST_KEYS];
    const float *before = w.before ? w.before + memory : nullptr;
    float *const after = w.after + memory;
    for (int64_t t = 0; t < w.count; ++t, before = after) {
        const float *mixed = w.mixed + t * w.channels, *entered = w.entered + t * w.entered_stride;
        unit(mixed + shared * keys, keys, 1.f / __builtin_sqrtf(static_cast<float>(keys)), q);
        unit(mixed + (layer.groups + shared) * keys, keys, 1.f, k);
        for (int64_t i = 0; i < each; ++i) {
            const int64_t at = head * each + i;
            alpha[i] = layer.rate[head] * softplus(entered[w.step_at + at] + layer.step_bias[at]);
        }
        by_16(each, [&](int64_t at, int lanes) { put(exp(get(alpha + at, lanes)), alpha + at, lanes); });
        for (int64_t i = each; i < keys; ++i) alpha[i] = alpha[0];
        by_16(keys, [&](int64_t at, int lanes) {
            const f32x16 a = get(alpha + at, lanes);
            put(a * get(k + at, lanes), decayed_k + at, lanes);
            put(a * get(q + at, lanes), decayed_q + at, lanes);
        });
        const float beta = layer.beta / (1.f + __builtin_expf(-entered[w.beta_at + head]));
        const float overlap = dot_product(q, k, keys);
        const float *v = mixed + 2 * layer.groups * keys + head * values;
        float *y = w.y + (t * layer.heads + head) * values;
        int64_t at = 0;
        for (; at + 64 <= values; at += 64)
            delta_columns<4>(before ? before + at : nullptr, after + at, keys, values, alpha, k, decayed_k, decayed_q,
                             overlap, beta, v + at, y + at, 16);
        for (; at < values; at += 16)
            delta_columns<1>(before ? before + at : nullptr, after + at, keys, values, alpha, k, decayed_k, decayed_q,
                             overlap, beta, v + at, y + at, static_cast<int>(values - at < 16 ? values - at : 16));
    }
}

/* Source: Dao and Gu 2024, arXiv:2405.21060, section 7. */
static void state_space(const Recurrence &w, int64_t head) {
    const pippin_recurrent &layer = *w.layer;
    const int64_t size = layer.key_dim, channels = layer.value_dim, inner = layer.heads * channels;
    const int64_t shared = head / (layer.heads / layer.groups);
    const int64_t memory = (layer.taps - 1) * w.channels + head * channels * size;
    const float *before = w.before ? w.before + memory : nullptr;
    float *const after = w.after + memory;
    for (int64_t t = 0; t < w.count; ++t, before = after) {
        const float *mixed = w.mixed + t * w.channels;
        const float *x = mixed + head * channels, *to = mixed + inner + shared * size, *from = to + layer.groups * size;
        float step = softplus(w.entered[t * w.entered_stride + w.step_at + head] + layer.step_bias[head]);
        step = step < layer.min_step ? layer.min_step : step > layer.max_step ? layer.max_step : step;
        const f32x16 decay = exp(f32x16::set1(layer.rate[head] * step));
        float *y = w.y + t * inner + head * channels;
        for (int64_t c = 0; c < channels; ++c) {
            const f32x16 written = f32x16::set1(x[c] * step);
            f32x16 sum = f32x16::zero();
            by_16(size, [&](int64_t at, int lanes) {
                f32x16 s = before ? get(before + c * size + at, lanes) * decay : f32x16::zero();
                s = fma(written, get(to + at, lanes), s);
                put(s, after + c * size + at, lanes);
                sum = fma(s, get(from + at, lanes), sum);
            });
            y[c] = reduce_add(sum) + layer.skip[head] * x[c];
        }
    }
}

/* A real-gated linear recurrent unit. Source: De et al. 2024, arXiv:2402.19427, section 2.4. */
static void gated_unit(const Recurrence &w, int64_t head) {
    const pippin_recurrent &layer = *w.layer;
    const int64_t size = layer.value_dim, all = layer.heads * size, begin = head * size;
    const int64_t memory = (layer.taps - 1) * w.channels;
    const float *before = w.before ? w.before + memory : nullptr;
    float *const after = w.after + memory;
    bool begun = before && before[all] > 0.f;
    for (int64_t t = 0; t < w.count; ++t, before = after, begun = true) {
        const float *x = w.mixed + t * w.channels + begin;
        float *y = w.y + t * all + begin;
        by_16(size, [&](int64_t at, int lanes) {
            f32x16 gates[2];
            for (int g = 0; g < 2; ++g) {
                const float *matrix = layer.open[g] + head * size * size + at;
                f32x16 sum = get(layer.open_bias[g] + begin + at, lanes);
                for (int64_t i = 0; i < size; ++i) sum = fma(f32x16::set1(x[i]), get(matrix + i * size, lanes), sum);
                gates[g] = sigmoid(sum);
            }
            const f32x16 rate = gates[1] * get(layer.rate + begin + at, lanes); // log of what is kept
            f32x16 entering = get(x + at, lanes) * gates[0];
            if (begun) {
                const f32x16 lost = max(f32x16::zero() - expm1(rate + rate), f32x16::set1(1e-12f));
                entering = entering * sqrt(lost);
            }
            const f32x16 h = before ? fma(exp(rate), get(before + begin + at, lanes), entering) : entering;
            put(h, y + at, lanes);
            put(h, after + begin + at, lanes);
        });
    }
    // what a former group of tokens left there says so already, and other heads may be reading it
    if (head == layer.heads - 1 && w.before != w.after) after[all] = 1.f;
}

static void recur(const Recurrence &work, int64_t head) {
    switch (work.layer->kind) {
    case PIPPIN_DELTA_RULE: return delta_rule(work, head);
    case PIPPIN_STATE_SPACE: return state_space(work, head);
    default: return gated_unit(work, head);
    }
}

static void product(float *x, const float *y, int64_t n) {
    by_16(n, [&](int64_t at, int lanes) { put(get(x + at, lanes) * get(y + at, lanes), x + at, lanes); });
}

static void leave(const pippin_recurrent &layer, float *gate, int64_t n, float *y) {
    const auto gated = [&](bool plain_sigmoid) {
        by_16(n, [&](int64_t at, int lanes) {
            const f32x16 g = get(gate + at, lanes), s = sigmoid(g);
            put(get(y + at, lanes) * (plain_sigmoid ? s : g * s), y + at, lanes);
        });
    };
    if (layer.gate == PIPPIN_GATE_SILU_BEFORE) gated(false);
    for (int64_t at = 0; layer.norm_size && at < n; at += layer.norm_size)
        norm(y + at, layer.norm + at, layer.eps, layer.norm_size, y + at);
    if (layer.gate == PIPPIN_GATE_SILU_AFTER || layer.gate == PIPPIN_GATE_SIGMOID_AFTER)
        gated(layer.gate == PIPPIN_GATE_SIGMOID_AFTER);
    if (layer.gate == PIPPIN_GATE_PLAIN) product(y, gate, n);
    if (layer.gate == PIPPIN_GATE_ACTIVATED) {
        activate({layer.activation, 0.f, nullptr}, gate, y, n);
        memcpy(y, gate, static_cast<size_t>(n) * sizeof(float));
    }
}

} // namespace PIPPIN_NS

#endif
