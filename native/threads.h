/* A pool of helper threads for regions of a few microseconds.
 *
 * Notable here:
 * - the caller works too, and waits only for helpers that did join in: one that the system put to sleep while others
 *   share the cores delays nobody
 * - work is handed out in chunks by an atomic counter, so who does what varies, but never what is computed
 * - helpers spin for some microseconds after a region, because the next one is near, and then sleep
 * - a second caller that finds the pool taken does its region alone
 */
#ifndef PIPPIN_THREADS_H
#define PIPPIN_THREADS_H

#include <cstdint>

namespace pippin {

constexpr int MOST_THREADS = 256;

using Body = void (*)(const void *context, int64_t begin, int64_t end, int thread);

/* Threads of a region, the caller's included; `thread` in a body is below it. */
int thread_count();

/* Stop the helpers and start others. Returns 0, PIPPIN_BAD_ARGUMENT or PIPPIN_NO_THREADS (then one thread is left). */
int set_thread_count(int count, bool pin);
bool threads_pinned();

/* Regions are near: wake sleeping helpers, and move those that are tied to the caller's core. */
void expect_regions();

/* Nanoseconds that this thread has waited so far for others to finish their chunks. */
int64_t waited();

/* Calls body(context, begin, end, thread) for all of [0, items) in pieces of at most `chunk` items. */
void run_region(int64_t items, int64_t chunk, Body body, const void *context);

/* The same for a callable body(begin, end, thread); a single piece is done right here. */
template <class F> inline void parallel(int64_t items, int64_t chunk, const F &body) {
    if (items <= 0) return;
    if (items <= chunk) return body(int64_t(0), items, 0);
    run_region(
        items, chunk,
        [](const void *context, int64_t begin, int64_t end, int thread) {
            (*static_cast<const F *>(context))(begin, end, thread);
        },
        &body);
}

/* Items per chunk so that every thread gets several, to even out their speeds: at least `least`. */
inline int64_t chunk_of(int64_t items, int64_t least, int64_t pieces = 8) {
    const int64_t chunk = items / (int64_t(thread_count()) * pieces);
    return chunk > least ? chunk : least;
}

} // namespace pippin

#endif
