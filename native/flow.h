/* What a flow block asks of the vector kernels beside a decoder's. Included by kernels.cpp for each instruction set.
 *
 * Notable here:
 * - keys lie transposed, with tokens in the lanes, and values with dimensions in the lanes: scores and sums are the same
 *   small product, of one query or of four at a time
 */
#ifndef PIPPIN_FLOW_H
#define PIPPIN_FLOW_H

#include "ops.h"

namespace PIPPIN_NS {

using pippin::FLOW_TILE;
using pippin::FlowQueries;

/* y[r][lane] = sum of a[r][i] * b[i][lane] over i, for ROWS rows and VECTORS vectors of 16 lanes. */
template <int ROWS, int VECTORS>
static void small_product(const float *a, int64_t a_stride, const float *b, int64_t b_stride, int64_t inner, float *y,
                          int64_t y_stride) {
    f32x16 sums[ROWS][VECTORS];
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) sums[r][v] = f32x16::zero();
    for (int64_t i = 0; i < inner; ++i) {
        f32x16 x[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) x[v] = f32x16::loadu(b + i * b_stride + 16 * v);
#pragma GCC unroll 4
        for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; ++v) sums[r][v] = fma(f32x16::set1(a[r * a_stride + i]), x[v], sums[r][v]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < VECTORS; ++v) sums[r][v].storeu(y + r * y_stride + 16 * v);
}

/* The same for `lanes` lanes, a multiple of 16. */
template <int ROWS>
static void small_products(const float *a, int64_t a_stride, const float *b, int64_t b_stride, int64_t inner, float *y,
                           int64_t y_stride, int64_t lanes) {
    constexpr int WIDE = side_by_side(ROWS);
    int64_t at = 0;
    for (; at + 16 * WIDE <= lanes; at += 16 * WIDE)
        small_product<ROWS, WIDE>(a, a_stride, b + at, b_stride, inner, y + at, y_stride);
    for (; at < lanes; at += 16) small_product<ROWS, 1>(a, a_stride, b + at, b_stride, inner, y + at, y_stride);
}

/* Weights of the first `seen` scores; zeros behind them, up to `lanes`, a multiple of 16. */
static void weigh_scores(float *scores, int64_t seen, int64_t lanes) {
    for (int64_t i = seen; i < lanes; ++i) scores[i] = -__builtin_inff();
    f32x16 most = f32x16::loadu(scores), sums = f32x16::zero();
    for (int64_t i = 16; i < lanes; i += 16) most = max(most, f32x16::loadu(scores + i));
    const f32x16 top = f32x16::set1(reduce_max(most));
    for (int64_t i = 0; i < lanes; i += 16) {
        const f32x16 e = exp(f32x16::loadu(scores + i) - top);
        e.storeu(scores + i);
        sums = sums + e;
    }
    const f32x16 inverse = f32x16::set1(1.f / reduce_add(sums));
    for (int64_t i = 0; i < lanes; i += 16) (f32x16::loadu(scores + i) * inverse).storeu(scores + i);
}

/* ROWS queries, the first of which sees `seen` keys and each next one more. */
template <int ROWS>
static void flow_tile(const FlowQueries &from, const float *q, float *out, int64_t seen, float *scratch) {
    const int64_t size = from.size, last = seen + ROWS - 1, lanes = (last + 15) / 16 * 16;
    float *scores = scratch + ROWS * size;
    const f32x16 scale = f32x16::set1(from.scale);
    for (int r = 0; r < ROWS; ++r)
        for (int64_t d = 0; d < size; d += 16)
            (f32x16::loadu(q + r * from.stride + d) * scale).storeu(scratch + r * size + d);
    small_products<ROWS>(scratch, size, from.keys, from.capacity, size, scores, from.capacity, lanes);
    for (int r = 0; r < ROWS; ++r) weigh_scores(scores + r * from.capacity, seen + r, lanes);
    small_products<ROWS>(scores, from.capacity, from.values, size, last, out, from.out_stride, size);
}

/* Keep the keys and values of new tokens, and attend with their queries. */
static void flow_attend(const FlowQueries &from, float *scratch) {
    for (int64_t i = 0; i < from.count; ++i) {
        const float *k = from.q + i * from.stride + from.width;
        for (int64_t d = 0; d < from.size; ++d) from.keys[d * from.capacity + from.held + i] = k[d];
        memcpy(from.values + (from.held + i) * from.size, k + from.width, static_cast<size_t>(from.size) * sizeof(float));
    }
    int64_t i = 0;
    for (; i + FLOW_TILE <= from.count; i += FLOW_TILE)
        flow_tile<FLOW_TILE>(from, from.q + i * from.stride, from.out + i * from.out_stride, from.held + i + 1, scratch);
    for (; i < from.count; ++i)
        flow_tile<1>(from, from.q + i * from.stride, from.out + i * from.out_stride, from.held + i + 1, scratch);
}

static pippin::FlowKernels flow_kernels() { return {flow_attend}; }

} // namespace PIPPIN_NS

#endif
