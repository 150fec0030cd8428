/* Working memory that a thread keeps from one call to the next. */
#ifndef PIPPIN_MEMORY_H
#define PIPPIN_MEMORY_H

#include <cstdint>
#include <cstdlib>
#include <new>

namespace pippin {

/* Memory that grows, begins at a multiple of 64, and is given back when its thread ends. */
class Memory {
  public:
    ~Memory() { std::free(data_); }
    uint8_t *get(int64_t bytes) {
        if (bytes > size_) {
            release();
            data_ = static_cast<uint8_t *>(std::aligned_alloc(64, size_t(bytes + 4095) / 4096 * 4096));
            if (!data_) throw std::bad_alloc();
            size_ = bytes;
        }
        return data_;
    }
    /* Give back what is more than a thread should keep. */
    void trim() {
        if (size_ > MOST_KEPT) release();
    }

  private:
    static constexpr int64_t MOST_KEPT = 64 << 20; // bytes
    void release() {
        std::free(data_);
        data_ = nullptr, size_ = 0;
    }

    uint8_t *data_ = nullptr;
    int64_t size_ = 0;
};

} // namespace pippin

#endif
