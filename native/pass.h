/* What one pass of a decoder works with; see decoder.cpp. */
#ifndef PIPPIN_PASS_H
#define PIPPIN_PASS_H

#include <algorithm>
#include <chrono>
#include <cstring>
#include <initializer_list>
#include <vector>

#include "library.h"
#include "memory.h"
#include "model.h"
#include "threads.h"

namespace pippin {

constexpr int64_t GROUP = 128; // tokens that go through a layer together, where all experts are there

/* What `pippin_fetch` was asked for did not come. */
struct NotFetched {};

/* Cuts one piece of memory into arrays; without memory it only counts. */
struct Cutter {
    uint8_t *base;
    int64_t used = 0;
    template <class T> void cut(T *&array, int64_t count) {
        array = base ? reinterpret_cast<T *>(base + used) : nullptr;
        used += (count * int64_t(sizeof(T)) + 63) / 64 * 64;
    }
};

enum Part { LINEAR, ATTENTION, REST, WAITING };

/* Gives the time since the last call to one part of the pass, without what was spent waiting. */
class Clock {
  public:
    Clock() : last_(now()), waited_(waited()) {}
    ~Clock() { profile_add(spent_); }
    void lap(Part part) {
        const int64_t time = now(), wait = waited();
        spent_[part] += time - last_ - (wait - waited_);
        spent_[WAITING] += wait - waited_;
        last_ = time, waited_ = wait;
    }

  private:
    static int64_t now() { return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1); }
    int64_t last_, waited_, spent_[4] = {};
};

/* One matrix and where its results go: (tokens, rows). */
struct Product {
    const pippin_matrix *weight;
    float *y;
    const float *bias;
    int change;         // which of an adapter's changes of the layer it has; -1: none
    int64_t stride = 0; // between the results of tokens; 0: as many as there are
    int64_t row() const { return stride ? stride : weight->rows; }
};

/* Numbers of a token that enter a recurrence, its gate included. */
inline int64_t entered_columns(const pippin_recurrent &layer) {
    int64_t columns = 0;
    for (int i = 0; i < 4; ++i) columns += layer.in[i].rows;
    for (int i = 4; i < 6; ++i) columns += layer.in[layer.in[6].rows ? i + 2 : i].rows;
    return columns;
}

class Pass {
  public:
    Pass(const pippin_model &model, const Ropes &ropes, void *pool, int cache, const pippin_batch &batch);
    int run();

  private:
    struct Tile { // queries of one sequence, counted from the beginning of the group, and the parts that they see
        int32_t sequence;
        int64_t begin, end, from, to;
    };
    struct Tiles {
        int64_t most_parts = 0, most_rows = 0; // of any tile
        int64_t pairs = 0;                     // of a query and a key
    };

    void lay_out(Cutter &cutter);
    void begin();
    void keep_only_rows();
    void layer(int32_t index, bool narrow);
    void enter_track(int32_t index);
    void leave_track(int32_t index);
    void mix(int32_t index, int64_t from, int64_t to, bool own);
    void recurrence(int32_t index, int64_t from, int64_t to, float *y);
    int64_t enter(int32_t index, const pippin_recurrent &layer, int64_t from, int64_t count, Recurrence &work);
    void remember(const pippin_recurrent &layer, int32_t state, int64_t from, int64_t to, const Recurrence &work);
    void keys_and_values(int32_t index, int64_t from, int64_t to);
    void normalize_input(int32_t index, const pippin_layer &layer, int64_t token, float *y) const;
    void attention(int32_t index, int64_t from, int64_t to, bool own, float *y);
    Tiles cut_tiles(int32_t index, int64_t from, int64_t to);
    void attend(int32_t index, int64_t from, int64_t to);
    Cache cache_of(int32_t index) const;
    void read_layer_inputs();
    void leave_layer(int32_t index, int64_t from, int64_t to);
    void beside_dense(int32_t index, int64_t from, int64_t count);
    void latent_keys(int32_t index, int64_t from, int64_t to);
    void latent_attention(int32_t index, int64_t from, int64_t to, bool own, float *y);
    void head_products(const pippin_matrix *matrices, const float *x, int64_t x_stride, int64_t x_head, int64_t count,
                       float *y, int64_t y_stride, int64_t y_head);
    void rotation(const pippin_layer &layer, int64_t token, float (&gathered)[2][512], const float *&cos,
                  const float *&sin) const;
    void scale_by_position(const pippin_layer &layer, int64_t token, float *q) const;
    void observe(int32_t index, int64_t from, int64_t to);
    void steer(int64_t site, int64_t token, float *x) const;
    void steer_all(int64_t site, int64_t from, int64_t to);
    void attend_whole(int32_t index, const Queries &queries, const Tiles &tiles);
    void attend_parts(int32_t index, const Queries &queries, const Tiles &tiles);
    void feed_forward(int32_t index, int64_t from, int64_t to);
    void experts(int32_t index, int64_t from, int64_t count, const float *routed_by);
    void compute_runs(int32_t index);
    void fetch_runs(int32_t index);
    void predict(int32_t index, int64_t from, int64_t count);
    void route(const pippin_layer &layer, int32_t index, int64_t from, int64_t count, const float *read);
    void read_router(const pippin_layer &layer, int64_t count, const float *read, float *routes);
    const float *given_weights(int32_t index, int64_t token) const;
    void choose(const pippin_layer &layer, const float *given, float *routes, float *choice, uint8_t *taken) const;
    void mix_sparsely(const pippin_layer &layer, float *routes, float *weights, uint8_t *taken) const;
    template <class Make> void expert_products(int32_t index, bool down, const float *x, const Make &make);
    template <class Make>
    void inner(const pippin_expert &layer, const Activation &activation, const float *x, int64_t count, float *y,
               int32_t index, int64_t from, const Make &make);
    void turn(const pippin_layer &layer, int32_t index, int64_t from, int64_t to, bool queries, bool keys);
    void normalize(const float *weight, const float *bias, const float *x, float *y) const;
    void add_back(const float *post_norm, const float *bias, float *y, int64_t site, int64_t from, int64_t to);
    void finish();

    template <class Make>
    void products(const float *x, int64_t columns, int64_t count, const Product *const *list, int64_t some,
                  const Make &make);
    template <class Make>
    void products(const float *x, int64_t columns, int64_t count, std::initializer_list<Product> list, const Make &make) {
        const Product *each[4];
        int64_t some = 0;
        for (const Product &product : list) each[some++] = &product;
        products(x, columns, count, each, some, make);
    }
    void adapt(const Product &product, const float *x, int64_t count, int32_t layer, int64_t from);
    const int32_t *table(const pippin_layer &layer, int64_t sequence) const {
        return b_.tables + b_.table_starts[layer.group * b_.sequences + sequence];
    }
    /* How a sequence lost tokens, nullptr if it lost none. */
    const pippin_ragged *ragged(int64_t sequence) const {
        return b_.ragged ? b_.ragged[sequence] : nullptr;
    }
    int64_t first_head(int32_t index) const { return m_.cached_index[size_t(index)] * c_.kv_heads; }
    /* Queries that read a sequence. */
    Queries reading(Queries queries, int32_t index, int64_t sequence) const {
        const pippin_layer &layer = m_.layers[size_t(index)];
        queries.table = table(layer, sequence);
        queries.ragged = ragged(sequence);
        queries.first_head = first_head(index);
        return queries;
    }
    float *row(float *x, int64_t token, int64_t width) const { return x + token * width; }

    const pippin_model &m_;
    const pippin_config &c_;
    const pippin_batch &b_;
    const Ropes &ropes_;
    const KernelTable &kernel_;
    const StepKernels &step_;
    Cache pool_; // without a layer
    Clock clock_;
    const int64_t group_; // tokens that go through a layer together
    int64_t count_ = 0;   // tokens that are left
    int32_t *origin_;     // (count): which of the pass each of them is
    int32_t *slot_, *visible_; // (count): its own, and the last that it sees
    int32_t *sequence_;   // (count)
    float *x_;            // (count, width): the residual stream
    float *shared_, *total_; // (count, width): what enters a block of tracks; what those so far computed
    float *layer_inputs_, *layer_row_; // (tokens, layers, size): inputs of layers beside the hidden states
    float *normed_, *y_;  // (group, width)
    float *q_, *k_, *v_;  // (group, heads * head_dim), ...
    float *read_;         // what attention read, like q
    float *open_;         // what the gate of attention says, like q; queries of latent attention, and what it read
    float *low_q_;        // (group, rank of queries): latent attention
    uint8_t *head_prepared_;
    float *held_;         // (group, width): what attention adds, in layers whose parts are parallel
    float *beside_;       // (group, width): what a recurrence beside attention adds
    float *entered_, *mixed_, *recurred_, *low_gates_; // (group, ...): a recurrence, from its inputs to its outputs
    float *gate_, *up_;   // (group, inner)
    /* A mixture: a token lies in as many rows as it has experts; the rows of one expert are a run. */
    struct Run {
        int32_t expert;
        int64_t begin, count, panels_before;
    };
    float *predicted_;           // (depth, experts)
    float *routes_, *choice_;    // (group, experts): weights, -1 for those that are not chosen; what they are chosen by
    uint8_t *taken_;             // (group, experts)
    float *gathered_, *answers_; // (rows, width)
    float *run_gate_, *run_up_;  // (rows, inner)
    int32_t *source_, *expert_;  // (rows): token and expert of each
    int32_t *rows_, *used_;      // (group, active): rows of each token in the order of the experts; (group): how many
    uint8_t *run_prepared_[kActivationKinds];
    std::vector<Run> runs_;
    float *low_;          // (group, rank)
    uint8_t *prepared_[kActivationKinds];
    std::vector<Tile> tiles_;
};

/* The products of one input with several matrices. make(token) writes the token's row of x just before it is read;
 * x is (count, columns). */
template <class Make>
void Pass::products(const float *x, int64_t columns, int64_t count, const Product *const *list, int64_t some,
                    const Make &make) {
    Activations views[kActivationKinds];
    bool used[kActivationKinds] = {};
    int64_t panels = 0;
    for (int64_t i = 0; i < some; ++i) {
        used[int(activation_kind(list[i]->weight->format))] = true;
        panels += panel_count(list[i]->weight->rows);
    }
    for (int kind = 0; kind < kActivationKinds; ++kind)
        if (used[kind])
            views[kind] = kernel_.prepare(ActivationKind(kind), x, columns, count, columns, prepared_[kind], 0, 0);
    parallel(count, kMaxTile, [&](int64_t from, int64_t to, int) {
        for (int64_t token = from; token < to; ++token) make(token);
        for (int kind = 0; kind < kActivationKinds; ++kind)
            if (used[kind])
                kernel_.prepare(ActivationKind(kind), x, columns, count, columns, prepared_[kind], from, to);
    });
    clock_.lap(REST);
    const int64_t chunk = std::min<int64_t>(chunk_of(panels, 2) & ~int64_t(1), 16);
    parallel(panels, chunk, [&](int64_t from, int64_t to, int) {
        int64_t first = 0;
        for (int64_t i = 0; i < some; ++i) {
            const Product &product = *list[i];
            const int64_t last = first + panel_count(product.weight->rows);
            if (from < last && to > first) {
                const Activations &a = views[int(activation_kind(product.weight->format))];
                kernel_.matmul_panels(*product.weight, a, std::max(from, first) - first, std::min(to, last) - first,
                                      product.y, product.row(), product.bias);
            }
            first = last;
        }
    });
    clock_.lap(LINEAR);
}

/* y = down(act(gate x) * up x); adapters' changes unless the layer's index is -1. */
template <class Make>
void Pass::inner(const pippin_expert &layer, const Activation &activation, const float *x, int64_t count, float *y,
                 int32_t index, int64_t from, const Make &make) {
    const int64_t size = layer.up.rows;
    const bool gated = layer.gate.rows;
    const Product g{&layer.gate, gate_, layer.gate_bias, 4}, d{&layer.down, y, layer.down_bias, 6};
    const Product u{&layer.up, gated ? up_ : gate_, layer.up_bias, 5};
    if (gated) products(x, c_.width, count, {g, u}, make);
    else products(x, c_.width, count, {u}, make);
    if (index >= 0) {
        if (gated) adapt(g, x, count, index, from);
        adapt(u, x, count, index, from);
    }
    products(gate_, size, count, {d}, [&](int64_t i) {
        step_.activate(activation, row(gate_, i, size), gated ? row(up_, i, size) : nullptr, size);
    });
    if (index >= 0) adapt(d, gate_, count, index, from);
}

} // namespace pippin

#endif
