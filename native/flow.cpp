/* A flow block's pass over a few new tokens of a batch, and its inverse token by token, in one call each.
 *
 * Notable here:
 * - sequences of pictures are short and their models small: what is saved is the dozen calls of each layer and token
 * - work below a few ten thousand products stays on the caller's thread
 */
#include <cmath>
#include <cstring>

#include "library.h"
#include "matmul.h"
#include "memory.h"
#include "threads.h"

namespace pippin {
namespace {

constexpr int64_t LITTLE = 1 << 17; // products that no other thread is asked for

thread_local Memory pass_memory, told_memory;

int64_t padded(int64_t floats) { return (floats + 15) / 16 * 16; }

template <class F> void share(int64_t items, int64_t each, const F &body) {
    if (thread_count() == 1 || items * each < LITTLE) {
        body(int64_t(0), items, 0);
    } else {
        parallel(items, chunk_of(items, 1), body);
    }
}

/* One pass; all memory that it needs is taken when it begins. */
struct Pass {
    const pippin_flow &flow;
    const pippin_flow_batch &batch;
    const KernelTable &table = kernels();
    int64_t first, count;
    int64_t rows = batch.samples * batch.branches, tokens = rows * count, width = flow.width;
    int64_t size = width / flow.heads, scratch_size = padded(flow_scratch(size, batch.capacity));
    float *hidden, *normed, *wide, *scratch;

    Pass(const pippin_flow &flow_, const pippin_flow_batch &batch_, int64_t first_, int64_t count_)
        : flow(flow_), batch(batch_), first(first_), count(count_) {
        const int64_t widest = flow.hidden > 3 * width ? flow.hidden : 3 * width;
        const int64_t narrow = padded(tokens * (width > flow.inner ? width : flow.inner));
        const int64_t floats = 2 * narrow + padded(tokens * widest) + thread_count() * scratch_size;
        hidden = reinterpret_cast<float *>(pass_memory.get(floats * int64_t(sizeof(float))));
        normed = hidden + narrow, wide = normed + narrow, scratch = wide + padded(tokens * widest);
    }

    void multiply(const pippin_matrix &weight, const float *bias, const float *x, int64_t items, float *y) const {
        const Activations a = {ActivationKind::Float32, items, weight.columns, nullptr, x, weight.columns};
        share(panel_count(weight.rows), 16 * weight.columns * items, [&](int64_t begin, int64_t end, int) {
            table.matmul_panels(weight, a, begin, end, y, weight.rows, bias);
        });
    }

    void norm(const float *weight, const float *bias) const {
        share(tokens, 8 * width, [&](int64_t begin, int64_t end, int) {
            for (int64_t i = begin; i < end; ++i)
                table.step.layer_norm(hidden + i * width, weight, bias, flow.eps, width, normed + i * width);
        });
    }

    /* The new inputs of every row, as the first layer reads them. */
    void embed(const float *x) const {
        const int64_t block = count * flow.inner;
        for (int64_t s = 0; s < batch.samples; ++s)
            memcpy(normed + s * block, x + (s * batch.tokens + first) * flow.inner, size_t(block) * sizeof(float));
        multiply(flow.in, flow.in_bias, normed, batch.samples * count, hidden);
        const int64_t one = count * width, all = batch.samples * one;
        for (int64_t b = 1; b < batch.branches; ++b) memcpy(hidden + b * all, hidden, size_t(all) * sizeof(float));
        for (int64_t row = 0; row < rows; ++row)
            table.step.add(hidden + row * one, batch.added + (row * (batch.tokens - 1) + first) * width, 1.f, one);
    }

    /* From queries, keys and values in `wide` to what was read, in `normed`. */
    void attend(int64_t layer) const {
        const int64_t half = size * batch.capacity;
        share(rows * flow.heads, 2 * size * count * (first + count), [&](int64_t begin, int64_t end, int thread) {
            for (int64_t i = begin; i < end; ++i) {
                const int64_t row = i / flow.heads, head = i % flow.heads;
                float *keys = batch.cache + ((layer * rows + row) * flow.heads + head) * 2 * half;
                const float heat = batch.heat ? batch.heat[row] : 1.f;
                const FlowQueries queries = {wide + row * count * 3 * width + head * size, keys, keys + half,
                                             normed + row * count * width + head * size, 3 * width, width, width, size,
                                             batch.capacity, first, count, heat / std::sqrt(float(size))};
                table.flow.attend(queries, scratch + thread * scratch_size);
            }
        });
    }

    void apply(int64_t number) const {
        const pippin_flow_layer &layer = flow.layer[number];
        norm(layer.norm, layer.norm_bias);
        multiply(layer.read, layer.read_bias, normed, tokens, wide);
        attend(number);
        multiply(layer.write, layer.write_bias, normed, tokens, wide);
        table.step.add(hidden, wide, 1.f, tokens * width);
        norm(layer.feed_norm, layer.feed_norm_bias);
        multiply(layer.up, layer.up_bias, normed, tokens, wide);
        share(tokens, 32 * flow.hidden, [&](int64_t begin, int64_t end, int) {
            table.step.activate({PIPPIN_GELU, 0.f, nullptr}, wide + begin * flow.hidden, nullptr, (end - begin) * flow.hidden);
        });
        multiply(layer.down, layer.down_bias, wide, tokens, normed);
        table.step.add(hidden, normed, 1.f, tokens * width);
    }

    void run(const float *x, float *told) const {
        embed(x);
        for (int64_t layer = 0; layer < flow.layers; ++layer) apply(layer);
        multiply(flow.out, flow.out_bias, hidden, tokens, told);
    }
};

int check(const pippin_flow *flow, const pippin_flow_batch *batch, int64_t first, int64_t stop) {
    if (!flow || !batch || !batch->added || !batch->cache) return fail(PIPPIN_BAD_ARGUMENT, "a flow without its memory");
    if (flow->heads < 1 || flow->width % (16 * flow->heads))
        return fail(PIPPIN_BAD_ARGUMENT, "%lld heads do not divide a width of %lld into multiples of 16",
                    (long long)flow->heads, (long long)flow->width);
    if (first < 0 || first >= stop || stop >= batch->tokens || batch->capacity < batch->tokens - 1 ||
        batch->capacity % 16)
        return fail(PIPPIN_BAD_ARGUMENT, "inputs %lld to %lld of %lld tokens, in a cache of %lld", (long long)first,
                    (long long)stop, (long long)batch->tokens, (long long)batch->capacity);
    if (batch->samples < 1 || batch->branches < 1 || batch->branches > 2)
        return fail(PIPPIN_BAD_ARGUMENT, "%lld samples in %lld branches", (long long)batch->samples,
                    (long long)batch->branches);
    return PIPPIN_OK;
}

} // namespace
} // namespace pippin

extern "C" int pippin_flow_read(const pippin_flow *flow, const pippin_flow_batch *batch, const float *x, int64_t first,
                                int64_t count, float *told) try {
    using namespace pippin;
    const int bad = check(flow, batch, first, first + count);
    if (bad != PIPPIN_OK) return bad;
    Pass(*flow, *batch, first, count).run(x, told);
    pass_memory.trim();
    return PIPPIN_OK;
} catch (const std::bad_alloc &) {
    return pippin::fail(PIPPIN_NO_MEMORY, "no memory for a pass of %lld tokens", (long long)count);
}

extern "C" int pippin_flow_invert(const pippin_flow *flow, const pippin_flow_batch *batch, float *x, const float *z,
                                  const float *weights, int64_t first, int64_t stop) try {
    using namespace pippin;
    const int bad = check(flow, batch, first - 1, stop - 1);
    if (bad != PIPPIN_OK) return bad;
    const int64_t samples = batch->samples, inner = flow->inner, row = 2 * inner;
    float *told = reinterpret_cast<float *>(told_memory.get(samples * batch->branches * row * int64_t(sizeof(float))));
    for (int64_t token = first; token < stop; ++token) {
        Pass(*flow, *batch, token - 1, 1).run(x, told);
        for (int64_t s = 0; s < samples; ++s) {
            float *log = told + s * row, *mean = log + inner, *null = log + samples * row;
            for (int64_t i = 0; i < row && batch->branches == 2; ++i)
                log[i] = null[i] + (1.f + weights[token]) * (log[i] - null[i]);
            const int64_t at = (s * batch->tokens + token) * inner;
            for (int64_t i = 0; i < inner; ++i) x[at + i] = mean[i] + z[at + i] * std::exp(log[i]);
        }
    }
    return PIPPIN_OK;
} catch (const std::bad_alloc &) {
    return pippin::fail(PIPPIN_NO_MEMORY, "no memory for a pass of a flow");
}
