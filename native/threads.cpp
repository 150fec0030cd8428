/* The pool of threads.h. One word says whether a region is open, which one it is, and how many helpers are inside.
 *
 * Notable here:
 * - where others use the cores too, helpers can cost more than they give: one that runs on the caller's core takes its
 *   time, and one that is interrupted in the middle of a chunk holds the caller up. The first moves or sleeps again; and
 *   while helpers do little, the caller works alone for some time, and for twice as long when that did not change
 */
#include "threads.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <new>
#include <vector>

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include "pippin.h"

namespace pippin {
namespace {

constexpr int64_t SPIN_NS = 50'000;    // a helper's wait for the next region before it sleeps
constexpr int64_t JOIN_NS = 100'000;   // the caller's wait for helpers before it sleeps
constexpr int64_t STALL_NS = 300'000;  // a wait that only an interrupted helper can cause, besides the time of chunks
constexpr int64_t WAKE_NS = 200'000;   // between two attempts to wake helpers
constexpr int64_t ALONE_NS = 5'000'000, MOST_ALONE_NS = 640'000'000;
constexpr int64_t JUDGED = 64;         // regions after which the helpers' part is looked at
constexpr uint64_t OPEN = 1u << 31;    // gate: number of the region << 32 | open | the caller sleeps | helpers inside
constexpr uint64_t SLEEPS = 1u << 30;
constexpr uint64_t INSIDE = SLEEPS - 1;

int64_t now() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

int core_now() {
#ifdef __linux__
    return sched_getcpu();
#else
    return -1;
#endif
}

thread_local int64_t waited_ns = 0;

/* The cores that this process may run on; empty where the system does not say. */
std::vector<int> cores_allowed() {
    std::vector<int> cores;
#ifdef __linux__
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0)
        for (int core = 0; core < CPU_SETSIZE; ++core)
            if (CPU_ISSET(core, &set)) cores.push_back(core);
#endif
    return cores;
}

class Pool {
  public:
    Pool(int count, bool pin) : count_(count), pin_(pin), cores_(cores_allowed()) {}

    int count() const { return count_.load(std::memory_order_relaxed); }
    bool pin() const { return pin_.load(std::memory_order_relaxed); }

    /* Only one caller at a time has the helpers; also taken to change the pool. */
    bool take() { return !taken_.exchange(true, std::memory_order_acquire); }
    void give() { taken_.store(false, std::memory_order_release); }
    void take_waiting() {
        while (!take()) sched_yield();
    }

    bool start();
    void stop();
    void reset(int count, bool pin) {
        count_.store(count), pin_.store(pin);
        cores_ = cores_allowed();
        regions_ = chunks_ = alone_until_ = 0, alone_ns_ = ALONE_NS;
        helped_.store(0);
    }
    void region(int64_t items, int64_t chunk, Body body, const void *context);
    void expect();

  private:
    struct Helper {
        Pool *pool;
        int index;
        int core;
        pthread_t thread;
    };

    static void *enter(void *helper);
    void help(int index);
    bool join(uint64_t &last, int index);
    bool sleep(uint64_t last);
    void wake();
    void wake_sleeping(int64_t time);
    int64_t work(int thread);
    void wait_for_helpers(int64_t begin);
    void judge(int64_t time, bool stalled);
    bool move_away();
    bool beside_caller() const {
        const int core = core_now();
        return core >= 0 && core == caller_core_.load(std::memory_order_relaxed);
    }
    bool open_to(uint64_t last) const {
        const uint64_t gate = gate_.load(std::memory_order_seq_cst);
        return (gate & OPEN) && (gate >> 32) != last;
    }
    void tie(Helper &helper, int core);

    alignas(64) std::atomic<uint64_t> gate_{0};
    alignas(64) std::atomic<int64_t> next_{0};
    alignas(64) int64_t items_ = 0, chunk_ = 1; // of the open region: written before the gate opens
    Body body_ = nullptr;
    const void *context_ = nullptr;
    uint64_t number_ = 0;

    alignas(64) std::atomic<int64_t> helped_{0}; // chunks that helpers did
    int64_t regions_ = 0, chunks_ = 0;           // since the last judgment
    int64_t alone_until_ = 0, alone_ns_ = ALONE_NS, woken_at_ = 0;

    alignas(64) std::atomic<bool> taken_{false};
    std::atomic<int> asleep_{0};
    std::atomic<int> caller_core_{-1};
    std::atomic<bool> stopping_{false};
    bool started_ = false;
    std::atomic<int> count_;
    std::atomic<bool> pin_;
    std::vector<int> cores_;
    std::vector<Helper *> helpers_;
    std::mutex mutex_;
    std::condition_variable condition_, done_;
    uint64_t woken_ = 0; // guarded by mutex_
};

void Pool::tie(Helper &helper, int core) {
#ifdef __linux__
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(core, &set);
    if (pthread_setaffinity_np(helper.thread, sizeof set, &set) == 0) helper.core = core;
#else
    (void)helper, (void)core;
#endif
}

/* Start the helpers; false if the system has no more threads (then there are as many as it had). */
bool Pool::start() {
    if (started_) return true;
    started_ = true;
    const int wanted = count();
    sigset_t all, before; // signals are for the threads of the program that we are part of
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (int index = 1; index < wanted; ++index) {
        auto *helper = new (std::nothrow) Helper{this, index, -1, {}};
        if (!helper || pthread_create(&helper->thread, nullptr, enter, helper) != 0) {
            delete helper;
            count_.store(index, std::memory_order_relaxed);
            break;
        }
        helpers_.push_back(helper);
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    if (count() < wanted) return false;
#ifdef __linux__
    // helpers take all cores but the caller's; more threads than cores are left to the system
    if (pin_ && wanted <= int(cores_.size())) {
        const int own = core_now();
        size_t at = 0;
        for (Helper *helper : helpers_) {
            if (cores_[at] == own && at + 1 < cores_.size()) ++at;
            tie(*helper, cores_[at++]);
        }
    }
#endif
    return true;
}

void Pool::stop() {
    stopping_.store(true);
    wake();
    for (Helper *helper : helpers_) {
        pthread_join(helper->thread, nullptr);
        delete helper;
    }
    helpers_.clear();
    stopping_.store(false);
    started_ = false;
}

void *Pool::enter(void *argument) {
    // `helper` itself is the caller's to change: only what never changes is read here
    const Helper *helper = static_cast<const Helper *>(argument);
    helper->pool->help(helper->index);
    return nullptr;
}

/* Leave the caller's core, where this helper is not tied to it. */
bool Pool::move_away() {
#ifdef __linux__
    if (pin()) return false; // the caller will do it
    cpu_set_t set;
    CPU_ZERO(&set);
    for (int core : cores_)
        if (core != caller_core_.load(std::memory_order_relaxed)) CPU_SET(core, &set);
    return CPU_COUNT(&set) > 0 && sched_setaffinity(0, sizeof set, &set) == 0 && !beside_caller();
#else
    return false;
#endif
}

void Pool::help(int index) {
    uint64_t last = 0;
    for (;;) {
        const int64_t begin = now();
        for (int turn = 1;; ++turn) {
            if (stopping_.load(std::memory_order_relaxed)) return;
            const bool beside = (turn == 1 || turn % 64 == 0) && beside_caller() && !move_away();
            if (!beside && open_to(last) && join(last, index)) break;
            pause();
            if (turn % 64 == 0 && (now() - begin > SPIN_NS || beside)) {
                if (!sleep(last)) return;
                break;
            }
        }
    }
}

/* Enter the open region, if it still is open, and help until it has no more work. */
bool Pool::join(uint64_t &last, int index) {
    uint64_t gate = gate_.load(std::memory_order_acquire);
    while ((gate & OPEN) && (gate >> 32) != last) {
        if (!gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acq_rel)) continue;
        last = gate >> 32;
        helped_.fetch_add(work(index), std::memory_order_relaxed);
        if ((gate_.fetch_sub(1, std::memory_order_acq_rel) & (SLEEPS | INSIDE)) == (SLEEPS | 1)) {
            std::lock_guard<std::mutex> lock(mutex_); // the caller is not between its look and its sleep
            done_.notify_all();
        }
        return true;
    }
    return false;
}

/* Sleep until someone wakes the pool; false if it stops. */
bool Pool::sleep(uint64_t last) {
    std::unique_lock<std::mutex> lock(mutex_);
    const uint64_t seen = woken_;
    asleep_.fetch_add(1, std::memory_order_seq_cst); // before the look at the gate: the caller does it the other way
    if ((!open_to(last) || beside_caller()) && !stopping_.load()) // beside the caller, only a call wakes it
        condition_.wait(lock, [&] { return woken_ != seen || stopping_.load(); });
    else
        asleep_.fetch_sub(1, std::memory_order_relaxed);
    return !stopping_.load();
}

void Pool::wake() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        ++woken_;
        asleep_.store(0, std::memory_order_relaxed);
    }
    condition_.notify_all();
}

void Pool::wake_sleeping(int64_t time) {
    if (asleep_.load(std::memory_order_seq_cst) == 0 || time - woken_at_ < WAKE_NS) return;
    woken_at_ = time;
    wake();
}

/* Do chunks of the open region until there are no more; returns how many. */
int64_t Pool::work(int thread) {
    const int64_t items = items_, chunk = chunk_;
    for (int64_t done = 0;; ++done) {
        const int64_t begin = next_.fetch_add(chunk, std::memory_order_relaxed);
        if (begin >= items) return done;
        body_(context_, begin, begin + chunk < items ? begin + chunk : items, thread);
    }
}

void Pool::region(int64_t items, int64_t chunk, Body body, const void *context) {
    const int64_t begin = now();
    items_ = items, chunk_ = chunk, body_ = body, context_ = context;
    next_.store(0, std::memory_order_relaxed);
    if (begin < alone_until_) {
        work(0);
        return;
    }
    number_ = (number_ + 1) & 0xffffffff;
    if (number_ == 0) number_ = 1; // 0 is what a new helper has seen last
    caller_core_.store(core_now(), std::memory_order_relaxed);
    gate_.store(number_ << 32 | OPEN, std::memory_order_seq_cst);
    wake_sleeping(begin);
    const int64_t own = work(0);
    const uint64_t gate = gate_.fetch_and(~OPEN, std::memory_order_acq_rel);
    chunks_ += (items + chunk - 1) / chunk;
    ++regions_;
    if (!(gate & INSIDE) && regions_ < JUDGED) return;
    const int64_t end = now();
    bool stalled = false;
    if (gate & INSIDE) {
        wait_for_helpers(end);
        const int64_t waited = now() - end;
        waited_ns += waited;
        stalled = waited > STALL_NS + 4 * (end - begin) / (own > 0 ? own : 1);
    }
    if (stalled || regions_ >= JUDGED) judge(end, stalled);
}

void Pool::wait_for_helpers(int64_t begin) {
    for (int turn = 1; gate_.load(std::memory_order_acquire) & INSIDE; ++turn) {
        pause();
        if (turn % 64 || now() - begin < JOIN_NS) continue;
        std::unique_lock<std::mutex> lock(mutex_);
        if (gate_.fetch_or(SLEEPS, std::memory_order_acq_rel) & INSIDE)
            done_.wait(lock, [&] { return !(gate_.load(std::memory_order_acquire) & INSIDE); });
    }
}

/* Go on with the helpers if they did a fair part of the work; else alone, for a while. */
void Pool::judge(int64_t time, bool stalled) {
    const int64_t helped = helped_.exchange(0, std::memory_order_relaxed);
    if (stalled || 3 * helped < chunks_ - chunks_ / count()) { // a third of what equal parts would be
        alone_until_ = time + alone_ns_;
        alone_ns_ = 2 * alone_ns_ < MOST_ALONE_NS ? 2 * alone_ns_ : MOST_ALONE_NS;
    } else if (regions_ >= JUDGED) {
        alone_ns_ = ALONE_NS;
    }
    regions_ = chunks_ = 0;
}

void Pool::expect() {
    start();
    const int64_t time = now();
    if (time < alone_until_) return;
    caller_core_.store(core_now(), std::memory_order_relaxed);
    wake_sleeping(time);
#ifdef __linux__
    if (!pin_ || helpers_.empty() || helpers_.size() >= cores_.size()) return;
    const int own = core_now();
    for (Helper *helper : helpers_) {
        if (helper->core != own) continue;
        for (int core : cores_) {
            bool used = core == own;
            for (const Helper *other : helpers_) used = used || other->core == core;
            if (!used) return tie(*helper, core);
        }
    }
#endif
}

// Never destroyed: helpers may still look at it while the process ends.
std::atomic<Pool *> current{nullptr};
std::mutex changing;

void before_fork() {
    changing.lock();
    if (Pool *pool = current.load()) pool->take_waiting(); // no region is open while the memory is copied
}

void after_fork_parent() {
    if (Pool *pool = current.load()) pool->give();
    changing.unlock();
}

void after_fork_child() { // the helpers stayed behind: new ones start when they are needed
    if (Pool *pool = current.load()) current.store(new (std::nothrow) Pool(pool->count(), pool->pin()));
    changing.unlock();
}

// When the library is loaded, so that no fork finds the lock taken by a thread that makes the first pool.
[[maybe_unused]] const int registered = pthread_atfork(before_fork, after_fork_parent, after_fork_child);

Pool &the_pool() {
    if (Pool *pool = current.load(std::memory_order_acquire)) return *pool;
    std::lock_guard<std::mutex> lock(changing);
    if (Pool *pool = current.load()) return *pool;
    const size_t cores = cores_allowed().size();
    auto *pool = new Pool(cores < 1 ? 1 : cores > MOST_THREADS ? MOST_THREADS : int(cores), true);
    current.store(pool, std::memory_order_release);
    return *pool;
}

} // namespace

int thread_count() { return the_pool().count(); }

bool threads_pinned() { return the_pool().pin(); }

int64_t waited() { return waited_ns; }

int set_thread_count(int count, bool pin) {
    if (count < 1 || count > MOST_THREADS) return PIPPIN_BAD_ARGUMENT;
    Pool &old = the_pool();
    std::lock_guard<std::mutex> lock(changing);
    old.take_waiting();
    old.stop();
    old.reset(count, pin);
    const bool started = old.start();
    if (!started) {
        old.stop();
        old.reset(1, pin);
    }
    old.give();
    return started ? PIPPIN_OK : PIPPIN_NO_THREADS;
}

void expect_regions() {
    Pool &pool = the_pool();
    if (pool.count() < 2 || !pool.take()) return;
    pool.expect();
    pool.give();
}

void run_region(int64_t items, int64_t chunk, Body body, const void *context) {
    Pool &pool = the_pool();
    if (pool.count() < 2 || !pool.take()) {
        for (int64_t begin = 0; begin < items; begin += chunk)
            body(context, begin, begin + chunk < items ? begin + chunk : items, 0);
        return;
    }
    pool.start();
    pool.region(items, chunk, body, context);
    pool.give();
}

} // namespace pippin
