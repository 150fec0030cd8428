/* Latent attention, with the matrices from the latent vector to keys and values moved to queries and outputs: attention is
 * that of many heads over one key of kv_rank + rotated_dim dimensions, and no key of a head is ever computed.
 * Source: DeepSeek-V2, arXiv:2405.04434, section 2.1 and appendix C. */
#include "pass.h"

namespace pippin {

/* y = matrix of the head times the head's part of x, for all heads and tokens. */
void Pass::head_products(const pippin_matrix *matrices, const float *x, int64_t x_stride, int64_t x_head, int64_t count,
                         float *y, int64_t y_stride, int64_t y_head) {
    const ActivationKind kind = activation_kind(matrices[0].format);
    const int64_t columns = matrices[0].columns, panels = panel_count(matrices[0].rows);
    const int64_t bytes = (activation_bytes(kind, count, columns) + 63) / 64 * 64;
    const auto view = [&](int64_t head, int64_t end) {
        return kernel_.prepare(kind, x + head * x_head, x_stride, count, columns, head_prepared_ + head * bytes, 0, end);
    };
    if (bytes)
        parallel(c_.heads, 1, [&](int64_t a, int64_t b, int) {
            for (int64_t head = a; head < b; ++head) view(head, count);
        });
    parallel(c_.heads * panels, chunk_of(c_.heads * panels, 2), [&](int64_t a, int64_t b, int) {
        for (int64_t at = a, end; at < b; at = end) {
            const int64_t head = at / panels;
            end = std::min(b, (head + 1) * panels);
            kernel_.matmul_panels(matrices[head], view(head, 0), at - head * panels, end - head * panels,
                                  y + head * y_head, y_stride, nullptr);
        }
    });
}

/* The latent vectors and rotated keys of a group, to the cache. */
void Pass::latent_keys(int32_t index, int64_t from, int64_t to) {
    const pippin_layer &layer = m_.layers[size_t(index)];
    const pippin_latent &latent = m_.latent[size_t(index)];
    const float *x = layer.attention_norm ? normed_ : row(x_, from, c_.width);
    const Product k{&layer.k, k_, layer.k_bias, 1};
    products(x, c_.width, to - from, {k},
             [&](int64_t i) { normalize_input(index, layer, from + i, row(normed_, i, c_.width)); });
    adapt(k, x, to - from, index, from);
    const Cache cache = cache_of(index);
    parallel(to - from, PIPPIN_BLOCK, [&](int64_t a, int64_t b, int) {
        for (int64_t i = a; i < b; ++i) {
            float gathered[2][512], *key = k_ + i * c_.head_dim;
            const float *cos, *sin;
            rotation(layer, from + i, gathered, cos, sin);
            step_.norm(key, latent.kv_norm, latent.eps, latent.kv_rank, key);
            step_.heads(key + latent.kv_rank, 1, latent.rotated_dim, nullptr, 0.f, cos, sin);
            const int64_t slot = slot_[from + i];
            const int32_t block = table(layer, sequence_[from + i])[slot / PIPPIN_BLOCK];
            step_.keep(cache, block, int(slot % PIPPIN_BLOCK), key, key); // values are the first dimensions of keys
        }
    });
}

void Pass::latent_attention(int32_t index, int64_t from, int64_t to, bool own, float *y) {
    const pippin_layer &layer = m_.layers[size_t(index)];
    const pippin_latent &latent = m_.latent[size_t(index)];
    const int64_t count = to - from, size = latent.plain_dim + latent.rotated_dim, wide = c_.heads * size;
    if (own) latent_keys(index, from, to);
    const float *x = layer.attention_norm ? normed_ : row(x_, from, c_.width);
    const auto norm = [&](int64_t i) { normalize_input(index, layer, from + i, row(normed_, i, c_.width)); };
    const Product q{&layer.q, open_, layer.q_bias, 0};
    if (latent.q_a.rows) {
        const Product low{&latent.q_a, low_q_, latent.q_a_bias, 2};
        products(x, c_.width, count, {low}, norm);
        adapt(low, x, count, index, from);
        products(low_q_, latent.q_a.rows, count, {q}, [&](int64_t i) {
            float *narrow = row(low_q_, i, latent.q_a.rows);
            step_.norm(narrow, latent.q_a_norm, latent.eps, latent.q_a.rows, narrow);
        });
        adapt(q, low_q_, count, index, from);
    } else {
        products(x, c_.width, count, {q}, norm);
        adapt(q, x, count, index, from);
    }
    head_products(latent.keys, open_, wide, size, count, q_, c_.heads * c_.head_dim, c_.head_dim);
    parallel(count, PIPPIN_BLOCK, [&](int64_t a, int64_t b, int) {
        for (int64_t i = a; i < b; ++i) {
            float gathered[2][512];
            const float *cos, *sin;
            rotation(layer, from + i, gathered, cos, sin);
            for (int64_t head = 0; head < c_.heads; ++head) {
                float *rotated = q_ + (i * c_.heads + head) * c_.head_dim + latent.kv_rank;
                memcpy(rotated, open_ + i * wide + head * size + latent.plain_dim, size_t(latent.rotated_dim) * sizeof(float));
                step_.heads(rotated, 1, latent.rotated_dim, nullptr, 0.f, cos, sin);
            }
            scale_by_position(layer, from + i, q_ + i * c_.heads * c_.head_dim);
        }
    });
    clock_.lap(REST);
    attend(index, from, to);
    if (b_.observations) observe(index, from, to);
    clock_.lap(ATTENTION);
    const int64_t values = c_.heads * latent.value_dim;
    head_products(latent.values, read_, c_.heads * c_.head_dim, c_.head_dim, count, open_, values, latent.value_dim);
    const Product output{&layer.output, y, layer.output_bias, 3};
    products(open_, values, count, {output}, [](int64_t) {});
    adapt(output, open_, count, index, from);
}

} // namespace pippin
