#include "pool.h"

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

namespace aq {
namespace {

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// A worker that waits first spins, since the next phase of a forward is microseconds away; then yields, so that an
// oversubscribed machine lets the others arrive; between calls it finally sleeps, so that an idle engine is idle.
constexpr int kSpins = 2000;
constexpr auto kAwake = std::chrono::microseconds(500);

class Pool {
 public:
  explicit Pool(int threads) : threads_(threads) {
    for (int i = 1; i < threads; i++) workers_.emplace_back([this, i] { work(i); });
  }

  ~Pool() {
    stop_ = true;
    start();
    for (auto& worker : workers_) worker.join();
  }

  int threads() const { return threads_; }

  void run(void (*fn)(const Worker&, const void*), const void* argument) {
    fn_ = fn, argument_ = argument;
    start();
    fn(Worker{0, threads_}, argument);
    barrier();
  }

  void barrier() {
    if (threads_ == 1) return;
    const unsigned phase = phase_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads_ - 1) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.store(phase + 1, std::memory_order_release);
      return;
    }
    for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; spins++) {
      if (spins < kSpins) pause();
      else sched_yield();
    }
  }

 private:
  void start() {
    if (threads_ == 1) return;
    call_.fetch_add(1, std::memory_order_seq_cst);
    if (sleepers_.load(std::memory_order_seq_cst) > 0) {
      // Taking the lock closes the gap between a sleeper's last look at call_ and its wait.
      std::lock_guard<std::mutex> lock(mutex_);
      wake_.notify_all();
    }
  }

  void work(int index) {
    for (unsigned seen = 0;; ) {
      await_call(seen);
      seen = call_.load(std::memory_order_acquire);
      if (stop_) return;
      fn_(Worker{index, threads_}, argument_);
      barrier();
    }
  }

  void await_call(unsigned seen) {
    for (int spins = 0; spins < kSpins; spins++) {
      if (call_.load(std::memory_order_acquire) != seen) return;
      pause();
    }
    const auto sleep_at = std::chrono::steady_clock::now() + kAwake;
    while (std::chrono::steady_clock::now() < sleep_at) {
      if (call_.load(std::memory_order_acquire) != seen) return;
      sched_yield();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    sleepers_.fetch_add(1, std::memory_order_seq_cst);
    wake_.wait(lock, [&] { return call_.load(std::memory_order_seq_cst) != seen; });
    sleepers_.fetch_sub(1, std::memory_order_relaxed);
  }

  const int threads_;
  void (*fn_)(const Worker&, const void*) = nullptr;
  const void* argument_ = nullptr;
  std::atomic<bool> stop_{false};
  alignas(64) std::atomic<unsigned> call_{0};
  alignas(64) std::atomic<unsigned> phase_{0};
  alignas(64) std::atomic<int> arrived_{0};
  std::atomic<int> sleepers_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> workers_;
};

// Never destroyed at exit: a worker may be inside a wait, and joining it from a static destructor can deadlock.
Pool* pool = nullptr;

// A forked child has no worker threads: it abandons the parent's pool and starts its own on the next call.
void forget_pool_in_child() {
  if (pool != nullptr) pool = new Pool(1);
}

Pool& get() {
  if (pool == nullptr) {
    pool = new Pool(1);
    pthread_atfork(nullptr, nullptr, forget_pool_in_child);
  }
  return *pool;
}

}  // namespace

void Worker::barrier() const { pool->barrier(); }

void run(void (*fn)(const Worker&, const void*), const void* argument) { get().run(fn, argument); }

void set_threads(int threads) {
  if (threads == get().threads()) return;
  delete pool;
  pool = new Pool(threads);
}

int num_threads() { return get().threads(); }

}  // namespace aq
