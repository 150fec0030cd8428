/* A decoder's description as the passes read it. */
#ifndef PIPPIN_MODEL_H
#define PIPPIN_MODEL_H

#include <memory>
#include <mutex>
#include <vector>

#include "pippin.h"

namespace pippin {

/* Cosines and sines of (positions, head_dim / 2). */
struct Rope {
    std::vector<float> cos, sin;
    std::vector<uint8_t> axes; // of each frequency; empty: all 0
    int64_t positions = 0;
};
using Ropes = std::vector<std::shared_ptr<const Rope>>;

constexpr int32_t kMostGroups = 64; // of a mixture's experts

/* Bytes of one kv head in a block. */
static inline int64_t head_bytes(int64_t head_dim, int cache) {
    const int64_t size = cache == PIPPIN_CACHE_F32 ? 4 : cache == PIPPIN_CACHE_BF16 ? 2 : 1;
    return 2 * PIPPIN_BLOCK * (head_dim * size + (cache == PIPPIN_CACHE_INT8 ? 4 : 0));
}

/* Whether a pass can be done as `batch` says; else the status of `fail`. Everything is checked before work is done. */
int check_batch(const pippin_model &model, const Ropes &ropes, const void *pool, int64_t blocks, int cache,
                const pippin_batch &batch);

} // namespace pippin

struct pippin_model {
    pippin_config config;
    std::vector<pippin_layer> layers;
    std::vector<std::vector<pippin_expert>> experts;
    std::vector<pippin_recurrent> recurrent; // of each layer
    std::vector<pippin_latent> latent;       // likewise
    std::vector<int32_t> states;             // of each layer: which of all recurrent layers it is
    std::vector<int32_t> slots; // of each layer: where its keys lie among the layers of a block
    int32_t cached = 0;         // most layers with keys of their own in one group: what a block holds
    std::vector<int32_t> group_windows; // of each group: the window of all its layers, 0 if they differ or see all
    std::vector<int32_t> cached_index;  // of each layer: which of all layers with keys of their own it reads
    mutable std::mutex mutex;   // guards ropes
    pippin::Ropes ropes;

    pippin::Ropes tables() const {
        std::lock_guard<std::mutex> lock(mutex);
        return ropes;
    }
};

#endif
