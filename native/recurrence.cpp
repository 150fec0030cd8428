/* Recurrent layers in a pass: from the matrices before the recurrence to the one behind it. */
#include "pass.h"

namespace pippin {

/* The inputs of a recurrence. Returns the column of its outputs' gate. */
int64_t Pass::enter(int32_t index, const pippin_recurrent &layer, int64_t from, int64_t count, Recurrence &work) {
    const int64_t values = int64_t(layer.heads) * layer.value_dim, keys = int64_t(layer.groups) * layer.key_dim;
    const bool delta = layer.kind == PIPPIN_DELTA_RULE, low = layer.in[6].rows;
    work.channels = delta ? 2 * keys + values : layer.kind == PIPPIN_STATE_SPACE ? values + 2 * keys : values;
    work.conv_at = layer.kind == PIPPIN_STATE_SPACE ? values : layer.kind == PIPPIN_CONVOLUTION ? 2 * values : 0;
    work.beta_at = work.channels;
    work.step_at = layer.kind == PIPPIN_STATE_SPACE ? values + work.channels : work.channels + layer.heads;
    const int64_t gate_at = delta ? work.step_at + layer.decays : layer.kind == PIPPIN_STATE_SPACE ? 0 : values;
    work.entered_stride = entered_columns(layer);
    const int64_t stride = work.entered_stride;
    const float *x = m_.layers[size_t(index)].attention_norm ? normed_ : row(x_, from, c_.width);
    const auto norm = [&](int64_t i) {
        normalize_input(index, m_.layers[size_t(index)], from + i, row(normed_, i, c_.width));
    };
    std::vector<Product> made;
    int64_t at = 0;
    for (int i = 0; i < 6 && layer.in[i].rows; ++i) {
        if (low && i >= 4) { // through a narrow layer
            made.push_back({&layer.in[i], low_gates_ + (i - 4) * count * layer.in[4].rows, layer.in_bias[i], 8 + i});
            continue;
        }
        made.push_back({&layer.in[i], entered_ + at, layer.in_bias[i], 8 + i, stride});
        at += layer.in[i].rows;
    }
    std::vector<const Product *> listed;
    for (const Product &product : made) listed.push_back(&product);
    products(x, c_.width, count, listed.data(), int64_t(listed.size()), norm);
    for (const Product &product : made) adapt(product, x, count, index, from);
    for (int i = 0; low && i < 2; ++i) {
        const float *narrow = low_gates_ + i * count * layer.in[4].rows;
        const Product wide{&layer.in[6 + i], entered_ + (i ? gate_at : work.step_at), layer.in_bias[6 + i], 14 + i, stride};
        products(narrow, layer.in[4 + i].rows, count, {wide}, [](int64_t) {});
        adapt(wide, narrow, count, index, from);
    }
    if (layer.kind == PIPPIN_CONVOLUTION) // b and u; c is the gate
        parallel(count, 32, [&](int64_t a, int64_t b, int) {
            for (int64_t i = a; i < b; ++i)
                step_.product(row(entered_, i, stride) + 2 * values, row(entered_, i, stride), values);
        });
    return gate_at;
}

/* The recurrence over the group's tokens, each sequence from its state on. */
void Pass::remember(const pippin_recurrent &layer, int32_t state, int64_t from, int64_t to, const Recurrence &work) {
    std::vector<Recurrence> spans;
    const int64_t values = int64_t(layer.heads) * layer.value_dim;
    for (int64_t begin = from, end; begin < to; begin = end) {
        const int32_t s = sequence_[begin];
        for (end = begin + 1; end < to && sequence_[end] == s;) ++end;
        Recurrence span = work;
        span.count = end - begin;
        span.entered += (begin - from) * work.entered_stride;
        span.mixed += (begin - from) * work.channels;
        span.y += (begin - from) * values;
        span.after = b_.new_states[state * b_.sequences + s];
        // what a former group of tokens left is there already
        span.before = origin_[begin] > b_.starts[s] ? span.after : b_.states[state * b_.sequences + s];
        spans.push_back(span);
    }
    const int64_t wide = 256, pieces = (work.channels + wide - 1) / wide, all = int64_t(spans.size());
    const bool little = all * work.channels * layer.taps < (1 << 14) && spans[0].count == 1;
    parallel(all * pieces, little ? all * pieces : 1, [&](int64_t a, int64_t b, int) {
        for (int64_t item = a; item < b; ++item)
            step_.convolve(spans[size_t(item / pieces)], item % pieces * wide,
                           std::min(item % pieces * wide + wide, work.channels));
    });
    if (layer.kind == PIPPIN_CONVOLUTION) return;
    const int64_t memory = int64_t(layer.key_dim) * layer.value_dim;
    const int64_t chunk = std::max<int64_t>(1, std::min<int64_t>(layer.heads, (1 << 14) / std::max<int64_t>(memory, 1)));
    parallel(all * layer.heads, spans[0].count == 1 ? chunk : 1, [&](int64_t a, int64_t b, int) {
        for (int64_t item = a; item < b; ++item) step_.recur(spans[size_t(item / layer.heads)], item % layer.heads);
    });
}

/* y = the outputs of a layer's recurrence. */
void Pass::recurrence(int32_t index, int64_t from, int64_t to, float *y) {
    const pippin_recurrent &layer = m_.recurrent[size_t(index)];
    const int64_t count = to - from, values = int64_t(layer.heads) * layer.value_dim;
    Recurrence work{&layer, entered_, mixed_, recurred_, 0, 0, 0, 0, 0, 0, nullptr, nullptr};
    const int64_t gate_at = enter(index, layer, from, count, work);
    remember(layer, m_.states[size_t(index)], from, to, work);
    clock_.lap(ATTENTION);
    float *told = layer.kind == PIPPIN_CONVOLUTION ? mixed_ : recurred_;
    const Product out{&layer.out, y, layer.out_bias, 8 + PIPPIN_INPUTS};
    products(told, values, count, {out}, [&](int64_t i) {
        step_.leave(layer, row(entered_, i, work.entered_stride) + gate_at, values, row(told, i, values));
    });
    adapt(out, told, count, index, from);
}

} // namespace pippin
