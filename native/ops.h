/* Norms, rotation, activations and other work on single vectors. Included by kernels.cpp for each instruction set.
 *
 * Notable here:
 * - all sums have one fixed order, whatever else is computed
 */
#ifndef PIPPIN_OPS_H
#define PIPPIN_OPS_H

#include "simd.h"
#include "step.h"

namespace PIPPIN_NS {

/* Calls body(at, lanes) for each 16 of n, the last one with fewer lanes. */
template <class F> PIPPIN_INLINE void by_16(int64_t n, const F &body) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) body(i, 16);
    if (i < n) body(i, static_cast<int>(n - i));
}

PIPPIN_INLINE f32x16 get(const float *p, int lanes) {
    return lanes == 16 ? f32x16::loadu(p) : f32x16::loadu_first(p, lanes);
}
PIPPIN_INLINE void put(f32x16 x, float *p, int lanes) { lanes == 16 ? x.storeu(p) : x.store_first(p, lanes); }

PIPPIN_INLINE float dot_product(const float *a, const float *b, int64_t n) {
    f32x16 sums[4] = {f32x16::zero(), f32x16::zero(), f32x16::zero(), f32x16::zero()};
    int64_t i = 0;
    for (; i + 64 <= n; i += 64)
        for (int j = 0; j < 4; ++j)
            sums[j] = fma(f32x16::loadu(a + i + 16 * j), f32x16::loadu(b + i + 16 * j), sums[j]);
    by_16(n - i, [&](int64_t at, int lanes) { sums[0] = fma(get(a + i + at, lanes), get(b + i + at, lanes), sums[0]); });
    return reduce_add((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

/* Source: Zhang and Sennrich 2019, arXiv:1910.07467, eq. 4. */
static void norm(const float *x, const float *weight, float eps, int64_t n, float *y) {
    const float mean = dot_product(x, x, n) / static_cast<float>(n);
    const f32x16 scale = f32x16::set1(1.f / __builtin_sqrtf(mean + eps));
    by_16(n, [&](int64_t at, int lanes) { put(get(x + at, lanes) * scale * get(weight + at, lanes), y + at, lanes); });
}

/* Source: Ba et al. 2016, arXiv:1607.06450, eq. 3. */
static void layer_norm(const float *x, const float *weight, const float *bias, float eps, int64_t n, float *y) {
    f32x16 sums = f32x16::zero(), squares = f32x16::zero();
    by_16(n, [&](int64_t at, int lanes) { sums = sums + get(x + at, lanes); });
    const float mean = reduce_add(sums) / static_cast<float>(n);
    by_16(n, [&](int64_t at, int lanes) {
        put(get(x + at, lanes) - f32x16::set1(mean), y + at, lanes);
        const f32x16 centered = get(y + at, lanes);
        squares = fma(centered, centered, squares);
    });
    const f32x16 scale = f32x16::set1(1.f / __builtin_sqrtf(reduce_add(squares) / static_cast<float>(n) + eps));
    by_16(n, [&](int64_t at, int lanes) {
        put(fma(get(y + at, lanes) * scale, get(weight + at, lanes), get(bias + at, lanes)), y + at, lanes);
    });
}

/* Source of the rotation: Su et al. 2021, arXiv:2104.09864, with the pairs (i, i + head_dim / 2). */
static void heads(float *x, int64_t count, int64_t head_dim, const float *weight, float eps, const float *cos,
                  const float *sin) {
    const int64_t half = head_dim / 2;
    for (int64_t head = 0; head < count; ++head, x += head_dim) {
        if (weight) norm(x, weight, eps, head_dim, x);
        if (!cos) continue;
        by_16(half, [&](int64_t at, int lanes) {
            const f32x16 a = get(x + at, lanes), b = get(x + half + at, lanes);
            const f32x16 c = get(cos + at, lanes), s = get(sin + at, lanes);
            put(a * c - b * s, x + at, lanes);
            put(fma(a, s, b * c), x + half + at, lanes);
        });
    }
}

PIPPIN_INLINE f32x16 sigmoid(f32x16 x) {
    return f32x16::set1(1.f) / (f32x16::set1(1.f) + exp(f32x16::zero() - x));
}

/* The error function to 1.5e-7. Source: Abramowitz and Stegun, formula 7.1.26. */
PIPPIN_INLINE f32x16 erf(f32x16 x) {
    const f32x16 one = f32x16::set1(1.f), a = abs(x);
    const f32x16 t = one / fma(a, f32x16::set1(0.3275911f), one);
    f32x16 p = f32x16::set1(1.061405429f);
    p = fma(p, t, f32x16::set1(-1.453152027f));
    p = fma(p, t, f32x16::set1(1.421413741f));
    p = fma(p, t, f32x16::set1(-0.284496736f));
    p = fma(p, t, f32x16::set1(0.254829592f));
    const f32x16 y = one - p * t * exp(f32x16::zero() - a * a);
    return y * (x / max(a, f32x16::set1(1e-30f))); // with the sign of x
}

/* tanh by e^{2x} - 1, which keeps small values exact to their last places. */
PIPPIN_INLINE f32x16 tanh(f32x16 x) {
    const f32x16 e = expm1(max(f32x16::set1(-20.f), min(f32x16::set1(20.f), x + x)));
    return e / (e + f32x16::set1(2.f));
}

template <int ACTIVATION> PIPPIN_INLINE f32x16 activation(f32x16 x, const float *xielu) {
    if (ACTIVATION == PIPPIN_SILU) return x * sigmoid(x);
    if (ACTIVATION == PIPPIN_GELU)
        return x * f32x16::set1(0.5f) * (f32x16::set1(1.f) + erf(x * f32x16::set1(0.70710678f)));
    if (ACTIVATION == PIPPIN_GELU_TANH) { // (1 + tanh u) / 2 is the sigmoid of 2 u
        const f32x16 u = x * fma(x * x, f32x16::set1(2.f * 0.7978845608f * 0.044715f), f32x16::set1(2.f * 0.7978845608f));
        return x * sigmoid(u);
    }
    if (ACTIVATION == PIPPIN_GELU_SIGMOID) return x * sigmoid(f32x16::set1(1.702f) * x);
    if (ACTIVATION == PIPPIN_XIELU) { // Huang and Schlag 2024, arXiv:2411.13010; one of the halves is 0
        const f32x16 above = max(f32x16::zero(), x), below = min(f32x16::zero(), x);
        const f32x16 curved = fma(f32x16::set1(xielu[1]), expm1(below) - below, f32x16::set1(xielu[0]) * above * above);
        return fma(f32x16::set1(xielu[2]), x, curved);
    }
    const f32x16 positive = max(f32x16::zero(), x);
    return ACTIVATION == PIPPIN_RELU2 ? positive * positive : positive;
}

template <int ACTIVATION> static void activate_as(const pippin::Activation &how, float *gate, const float *up, int64_t n) {
    const float *xielu = how.xielu;
    if (!up)
        return by_16(n, [&](int64_t at, int lanes) {
            put(activation<ACTIVATION>(get(gate + at, lanes), xielu), gate + at, lanes);
        });
    if (how.limit == 0.f)
        return by_16(n, [&](int64_t at, int lanes) {
            put(activation<ACTIVATION>(get(gate + at, lanes), xielu) * get(up + at, lanes), gate + at, lanes);
        });
    const f32x16 limit = f32x16::set1(how.limit), one = f32x16::set1(1.f);
    by_16(n, [&](int64_t at, int lanes) {
        const f32x16 bounded = max(f32x16::zero() - limit, min(limit, get(up + at, lanes))) + one;
        put(activation<ACTIVATION>(min(limit, get(gate + at, lanes)), xielu) * bounded, gate + at, lanes);
    });
}

static void activate(const pippin::Activation &how, float *gate, const float *up, int64_t n) {
    switch (how.kind) {
    case PIPPIN_SILU: return activate_as<PIPPIN_SILU>(how, gate, up, n);
    case PIPPIN_GELU: return activate_as<PIPPIN_GELU>(how, gate, up, n);
    case PIPPIN_GELU_TANH: return activate_as<PIPPIN_GELU_TANH>(how, gate, up, n);
    case PIPPIN_RELU2: return activate_as<PIPPIN_RELU2>(how, gate, up, n);
    case PIPPIN_GELU_SIGMOID: return activate_as<PIPPIN_GELU_SIGMOID>(how, gate, up, n);
    case PIPPIN_XIELU: return activate_as<PIPPIN_XIELU>(how, gate, up, n);
    default: return activate_as<PIPPIN_RELU>(how, gate, up, n);
    }
}

static void open(float *x, const float *gate, int64_t n) {
    by_16(n, [&](int64_t at, int lanes) { put(get(x + at, lanes) * sigmoid(get(gate + at, lanes)), x + at, lanes); });
}

PIPPIN_INLINE f32x16 bounded(f32x16 x, float cap) { return f32x16::set1(cap) * tanh(x / f32x16::set1(cap)); }

static void bound(float *x, float cap, int64_t n) {
    by_16(n, [&](int64_t at, int lanes) { put(bounded(get(x + at, lanes), cap), x + at, lanes); });
}

static void add(float *x, const float *y, float scale, int64_t n) {
    const f32x16 s = f32x16::set1(scale);
    by_16(n, [&](int64_t at, int lanes) { put(fma(get(y + at, lanes), s, get(x + at, lanes)), x + at, lanes); });
}

static void multiply(float *x, float scale, int64_t n) {
    const f32x16 s = f32x16::set1(scale);
    by_16(n, [&](int64_t at, int lanes) { put(get(x + at, lanes) * s, x + at, lanes); });
}

static void dense(const float *matrix, int64_t rows, int64_t columns, const float *x, float *y, bool sum) {
    for (int64_t row = 0; row < rows; ++row) {
        const float value = dot_product(matrix + row * columns, x, columns);
        y[row] = sum ? y[row] + value : value;
    }
}

static void softmax(float *x, int64_t n) {
    float most = x[0];
    for (int64_t i = 1; i < n; ++i) most = x[i] > most ? x[i] : most;
    f32x16 sums = f32x16::zero();
    by_16(n, [&](int64_t at, int lanes) {
        const f32x16 e = exp(get(x + at, lanes) - f32x16::set1(most));
        put(e, x + at, lanes);
        sums = sums + get(x + at, lanes);
    });
    multiply(x, 1.f / reduce_add(sums), n);
}

static float read(const float *data, int64_t count) {
    f32x16 sums[8];
    for (int j = 0; j < 8; ++j) sums[j] = f32x16::zero();
    for (int64_t i = 0; i + 128 <= count; i += 128)
        for (int j = 0; j < 8; ++j) {
            prefetch(data + i + 16 * j + 1024);
            sums[j] = sums[j] + f32x16::loadu(data + i + 16 * j);
        }
    for (int j = 1; j < 8; ++j) sums[0] = sums[0] + sums[j];
    return reduce_add(sums[0]);
}

} // namespace PIPPIN_NS

#endif
