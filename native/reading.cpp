/* The part of a pass that reads the cache: which thread attends to what.
 *
 * Notable here:
 * - queries of one sequence go in tiles that share the keys they read; a tile and a kv head are one piece of work
 * - where there are too few of those, as in a long text's next token, a piece is one part of the keys: the states of the
 *   parts are merged in order, as one thread would do
 */
#include "pass.h"

#include <algorithm>
#include <atomic>

namespace pippin {
namespace {

constexpr int64_t LITTLE = 1 << 16; // multiplications that are not worth waking anyone for

thread_local Memory tile_memory, parts_memory;

float *floats(Memory &memory, int64_t count) {
    return reinterpret_cast<float *>(memory.get(count * int64_t(sizeof(float))));
}

/* The same of this thread's own; nullptr where there is no memory, since a helper has nobody to throw to. */
float *own_floats(int64_t count, std::atomic<bool> &failed) {
    try {
        return floats(tile_memory, count);
    } catch (const std::bad_alloc &) {
        failed.store(true);
        return nullptr;
    }
}

} // namespace

Pass::Tiles Pass::cut_tiles(int32_t index, int64_t from, int64_t to) {
    const pippin_layer &layer = m_.layers[size_t(index)];
    const int64_t group = c_.heads / layer.kv_heads, tile = tile_queries(group);
    Tiles found;
    tiles_.clear();
    for (int64_t begin = from, end; begin < to; begin = end) {
        const int32_t sequence = sequence_[begin];
        for (end = begin + 1; end < to && end - begin < tile && sequence_[end] == sequence;) ++end;
        int64_t lost = 0; // by the head that has the most
        if (const pippin_ragged *heads = ragged(sequence)) {
            const int32_t *first = heads->lost + first_head(index);
            lost = *std::min_element(first, first + layer.kv_heads);
        }
        const int64_t oldest = slot_[begin] - layer.window + 1 - lost, newest = visible_[end - 1] - lost;
        const int64_t first = layer.window && oldest > 0 ? oldest / PART : 0, last = newest / PART + 1;
        tiles_.push_back({sequence, begin - from, end - from, first, last});
        found.most_parts = std::max(found.most_parts, last - first);
        found.most_rows = std::max(found.most_rows, (end - begin) * group);
        found.pairs += (end - begin) * (newest + 1 - first * PART);
    }
    return found;
}

/* What the queries of a group read. */
void Pass::attend(int32_t index, int64_t from, int64_t to) {
    const pippin_layer &layer = m_.layers[size_t(index)];
    const Queries queries{cache_of(index), nullptr, q_, read_, slot_ + from, visible_ + from, c_.heads * layer.head_dim,
                          layer.window, int(c_.heads), c_.attention_scale, layer.softcap, layer.sinks};
    const Tiles tiles = cut_tiles(index, from, to);
    const int64_t threads = thread_count();
    const bool few = threads > 1 && int64_t(tiles_.size()) * layer.kv_heads < 4 * threads;
    if (few && tiles.most_parts > 1) attend_parts(index, queries, tiles);
    else attend_whole(index, queries, tiles);
}

/* What the tokens of observed sequences receive from the queries of a group. */
void Pass::observe(int32_t index, int64_t from, int64_t to) {
    const pippin_layer &layer = m_.layers[size_t(index)];
    for (int64_t o = 0; o < b_.observations; ++o) {
        const pippin_observed &seen = b_.observed[o];
        const Queries all{cache_of(index), nullptr, q_, read_, slot_ + from, visible_ + from, c_.heads * layer.head_dim,
                          layer.window, int(c_.heads), c_.attention_scale, layer.softcap, nullptr};
        const Queries queries = reading(all, index, seen.sequence);
        std::atomic<bool> failed{false};
        parallel(layer.kv_heads, 1, [&](int64_t first, int64_t last, int) {
            float *p = own_floats(seen.stride + 16 + layer.head_dim, failed);
            for (int64_t head = first; p && head < last; ++head) {
                const int64_t lost = queries.ragged ? queries.ragged->lost[queries.first_head + head] : 0;
                float *received = seen.received + (m_.cached_index[size_t(index)] * c_.kv_heads + head) * seen.stride;
                for (int64_t i = from; i < to; ++i) {
                    if (sequence_[i] != seen.sequence) continue;
                    const int64_t oldest = layer.window ? slot_[i] - layer.window + 1 - lost : 0;
                    const int64_t low = std::max<int64_t>(oldest, 0);
                    const int64_t high = seen.before < 0 ? visible_[i] + 1 : std::min<int64_t>(seen.before, visible_[i] + 1);
                    if (low < high - lost)
                        step_.receive(queries, int(head), i - from, low, high - lost, seen.max, p, received);
                }
            }
        });
        if (failed) throw std::bad_alloc();
    }
}

void Pass::attend_whole(int32_t index, const Queries &queries, const Tiles &tiles) {
    const int64_t kv_heads = queries.cache.kv_heads, head_dim = queries.cache.head_dim, group = c_.heads / kv_heads;
    const int64_t size = tiles.most_rows * state_stride(head_dim);
    const int64_t items = int64_t(tiles_.size()) * kv_heads;
    const bool little = tiles.pairs * c_.heads * head_dim < LITTLE;
    std::atomic<bool> failed{false};
    parallel(items, little ? items : 1, [&](int64_t begin, int64_t end, int) {
        float *state = own_floats(size + attend_scratch(head_dim, group), failed);
        for (int64_t item = begin; state && item < end; ++item) {
            const Tile &t = tiles_[tiles_.size() - 1 - size_t(item / kv_heads)]; // the longest first
            const Queries own = reading(queries, index, t.sequence);
            const int head = int(item % kv_heads);
            clear_states(state, (t.end - t.begin) * group, head_dim);
            step_.attend(own, head, t.begin, t.end, t.from, t.to, state, state + size);
            step_.finish(own, head, t.begin, t.end, state);
        }
    });
    if (failed) throw std::bad_alloc();
}

void Pass::attend_parts(int32_t index, const Queries &queries, const Tiles &tiles) {
    const int64_t kv_heads = queries.cache.kv_heads, head_dim = queries.cache.head_dim, group = c_.heads / kv_heads;
    const int64_t size = tiles.most_rows * state_stride(head_dim);
    const int64_t items = int64_t(tiles_.size()) * kv_heads, parts = tiles.most_parts;
    float *states = floats(parts_memory, items * parts * size);
    std::atomic<bool> failed{false};
    parallel(items * parts, 1, [&](int64_t begin, int64_t end, int) {
        float *scratch = own_floats(attend_scratch(head_dim, group), failed);
        for (int64_t piece = begin; scratch && piece < end; ++piece) {
            const Tile &t = tiles_[size_t(piece / parts / kv_heads)];
            const int64_t part = t.from + piece % parts;
            if (part >= t.to) continue;
            const Queries own = reading(queries, index, t.sequence);
            float *state = states + piece * size;
            clear_states(state, (t.end - t.begin) * group, head_dim);
            step_.attend(own, int(piece / parts % kv_heads), t.begin, t.end, part, part + 1, state, scratch);
        }
    });
    if (failed) throw std::bad_alloc();
    for (int64_t item = 0; item < items; ++item) {
        const Tile &t = tiles_[size_t(item / kv_heads)];
        float *state = states + item * parts * size;
        for (int64_t part = 1; part < t.to - t.from; ++part)
            step_.merge(state, state + part * size, (t.end - t.begin) * group, head_dim);
        step_.finish(queries, int(item % kv_heads), t.begin, t.end, state);
    }
}

} // namespace pippin
