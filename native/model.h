/* A decoder's description as the passes read it. */
#ifndef PIPPIN_MODEL_H
#define PIPPIN_MODEL_H

#include <algorithm>
#include <memory>
#include <mutex>
#include <vector>

#include "pippin.h"

namespace pippin {

/* Cosines and sines of (positions, half). */
struct Rope {
    int64_t half = 0;
    std::vector<float> cos, sin;
    std::vector<uint8_t> axes; // of each frequency; empty: all 0
    int64_t positions = 0;
};
using Ropes = std::vector<std::shared_ptr<const Rope>>;

constexpr int32_t kMostGroups = 64; // of a mixture's experts

/* Bytes of kv heads in a block that have so many dimensions together. */
static inline int64_t heads_bytes(int64_t heads, int64_t dimensions, int cache) {
    const int64_t size = cache == PIPPIN_CACHE_F32 ? 4 : cache == PIPPIN_CACHE_BF16 ? 2 : 1;
    return 2 * PIPPIN_BLOCK * (dimensions * size + (cache == PIPPIN_CACHE_INT8 ? 4 * heads : 0));
}

/* Whether a pass can be done as `batch` says; else the status of `fail`. Everything is checked before work is done. */
int check_batch(const pippin_model &model, const Ropes &ropes, const void *pool, int64_t blocks, int cache,
                const pippin_batch &batch);

} // namespace pippin

struct pippin_model {
    pippin_config config;
    std::vector<pippin_layer> layers;
    std::vector<std::vector<pippin_expert>> experts;
    pippin_fetch fetch = nullptr;
    void *fetch_context = nullptr;
    int32_t fetch_depth = 0;
    std::vector<pippin_recurrent> recurrent; // of each layer
    std::vector<pippin_latent> latent;       // likewise
    std::vector<int32_t> states;             // of each layer: which of all recurrent layers it is
    /* Of each layer: heads and numbers of the layers of its group whose keys lie before its own in a block. */
    std::vector<int64_t> heads_before, numbers_before;
    std::vector<int64_t> group_heads, group_numbers; // of each group: all of them
    std::vector<int32_t> rotary_dims;
    std::vector<int32_t> group_windows; // of each group: the window of all its layers, 0 if they differ or see all
    std::vector<int32_t> cached_index;  // of each layer: which of all layers with keys of their own it reads
    mutable std::mutex mutex;   // guards ropes
    pippin::Ropes ropes;

    int64_t block_bytes(int cache) const {
        int64_t most = 64; // a model that keeps nothing in blocks has blocks, too
        for (size_t g = 0; g < group_heads.size(); ++g)
            most = std::max(most, pippin::heads_bytes(group_heads[g], group_numbers[g], cache));
        return most;
    }

    pippin::Ropes tables() const {
        std::lock_guard<std::mutex> lock(mutex);
        return ropes;
    }
};

#endif
