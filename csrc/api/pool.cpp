#include "pool.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

namespace aq {

double seconds() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

namespace {

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// A counter to wait on. A waiter first spins, since the next phase of a forward is microseconds away, and then sleeps.
// An idle engine then uses no CPU time, and on a busy machine a woken thread preempts other programs, whereas a thread
// that yields in a loop waits for their time slices to end. A spin that ends in a sleep makes the next spin shorter: if
// two workers share a core because another program holds the second core, a spinning worker only delays the one that it
// waits for. A sleep that a longer spin would have avoided makes the next spin longer.
class Gate {
 public:
  explicit Gate(int max_spins) : max_spins_(max_spins), spins_(max_spins) {}

  unsigned value() const { return value_.load(std::memory_order_acquire); }

  void advance() {
    value_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) == 0) return;
    // Taking the lock closes the gap between a sleeper's last look and its wait.
    std::lock_guard<std::mutex> lock(mutex_);
    changed_.notify_all();
  }

  void wait_past(unsigned seen) {
    const int budget = spins_.load(std::memory_order_relaxed);
    for (int i = 0; i < budget; i++) {
      if (value() != seen) {
        if (budget < max_spins_) spins_.store(budget * 2, std::memory_order_relaxed);
        return;
      }
      pause();
    }
    const auto began = Clock::now();
    {
      std::unique_lock<std::mutex> lock(mutex_);
      sleepers_.fetch_add(1, std::memory_order_seq_cst);
      changed_.wait(lock, [&] { return value_.load(std::memory_order_seq_cst) != seen; });
      sleepers_.fetch_sub(1, std::memory_order_relaxed);
    }
    const bool was_short = Clock::now() - began < max_spins_ * kSpinTime;
    if (was_short && budget < max_spins_) spins_.store(budget * 2, std::memory_order_relaxed);
    if (!was_short && budget > kMinSpins) spins_.store(budget / 2, std::memory_order_relaxed);
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr int kMinSpins = 1 << 7;
  static constexpr std::chrono::nanoseconds kSpinTime{15};  // of one pause; more on Intel
  const int max_spins_;
  std::atomic<int> spins_;
  alignas(64) std::atomic<unsigned> value_{0};
  alignas(64) std::atomic<int> sleepers_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
};

class Pool {
 public:
  explicit Pool(int threads) : threads_(threads) {
    for (int i = 1; i < threads; i++) workers_.emplace_back([this, i] { work(i); });
  }

  ~Pool() {
    stop_ = true;
    calls_.advance();
    for (auto& worker : workers_) worker.join();
  }

  int threads() const { return threads_; }

  void run(void (*fn)(const Worker&, const void*), const void* argument) {
    fn_ = fn, argument_ = argument;
    if (threads_ > 1) calls_.advance();
    fn(Worker{0, threads_}, argument);
    barrier();
  }

  void barrier() {
    if (threads_ == 1) return;
    const unsigned phase = phases_.value();
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) < threads_ - 1) return phases_.wait_past(phase);
    arrived_.store(0, std::memory_order_relaxed);
    phases_.advance();
  }

 private:
  void work(int index) {
    for (unsigned seen = 0;; seen++) {  // every call ends with a barrier, so none is missed
      calls_.wait_past(seen);
      if (stop_) return;
      fn_(Worker{index, threads_}, argument_);
      barrier();
    }
  }

  const int threads_;
  void (*fn_)(const Worker&, const void*) = nullptr;
  const void* argument_ = nullptr;
  std::atomic<bool> stop_{false};
  Gate calls_{1 << 15}, phases_{1 << 12};  // about 500 and 60 microseconds: between calls the caller computes too
  alignas(64) std::atomic<int> arrived_{0};
  std::vector<std::thread> workers_;
};

// The pool is never destroyed at exit: a worker may be inside a wait, and joining it in a static destructor can
// deadlock.
Pool* pool = nullptr;
int wanted = 1;

Pool& get() {
  if (pool == nullptr) pool = new Pool(wanted);
  return *pool;
}

}  // namespace

void Worker::barrier() const { pool->barrier(); }

void run(void (*fn)(const Worker&, const void*), const void* argument) { get().run(fn, argument); }

void set_threads(int threads) {
  if (threads == wanted) return;
  delete pool;
  pool = nullptr;
  wanted = threads;
}

int num_threads() { return wanted; }

void forget_workers() { pool = nullptr; }

}  // namespace aq
