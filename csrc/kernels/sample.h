// The head: logits, drawing a token by Gumbel-argmax, the k best ids and log-probabilities. Twins of reference.draw,
// reference.top_k and reference.logprobs.
#pragma once
#include "linear.h"

namespace AQ_NAMESPACE {

using aq::Best;
using aq::DrawJob;
using aq::TopKJob;

constexpr int kChunk = 64;  // one maximum is kept per chunk of logits, so that a threshold skips most of them

AQ_INLINE int padded(int vocab) { return (vocab + kChunk - 1) / kChunk * kChunk; }

AQ_INLINE uint32_t lowbias32(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x7feb352d;
  x = (x ^ (x >> 15)) * 0x846ca68b;
  return x ^ (x >> 16);
}

AQ_INLINE IVec lowbias32(IVec x) {
  x = imul(ixor(x, shr<16>(x)), iset1(0x7feb352d));
  x = imul(ixor(x, shr<15>(x)), iset1(0x846ca68b));
  return ixor(x, shr<16>(x));
}

// The two words that key the noise of one drawn token.
struct Noise {
  uint32_t a, b;
  Noise(uint64_t seed, int32_t position) {
    a = lowbias32(lowbias32((uint32_t)seed ^ 0x243f6a88) ^ (uint32_t)(seed >> 32));
    b = lowbias32(lowbias32(a ^ (uint32_t)position) ^ 0x85a308d3);
  }
};

// Gumbel noise of 16 ids. With u = (bits + 1/2) / 2^32 below one half, -log(u); above, -log1p(-(1 - u)), where 1 - u
// has the bits of ~bits, as the log of the rounded u plus what the rounding lost.
AQ_INLINE Vec gumbel(const Noise& noise, IVec ids) {
  const IVec bits = lowbias32(ixor(lowbias32(iadd(imul(ids, iset1(0x9e3779b9)), iset1(noise.a))), iset1(noise.b)));
  const auto high = sign_bit(bits);
  const IVec distance = iselect(high, ixor(bits, iset1(0xffffffff)), bits);
  const Vec u = mul(add(to_float(distance), set1(0.5f)), set1(0x1p-32f));
  const Vec rounded = sub(set1(1.0f), u);
  const Vec lost = sub(sub(set1(1.0f), rounded), u);
  const Vec exponential = select(high, add(log(rounded), div(lost, rounded)), log(u));
  return sub(zero(), log(sub(zero(), exponential)));
}

static void clear(Best* best) {
  for (int i = 0; i < 16; i++) best->score[i] = -kInfinity, best->id[i] = 0xffffffff;
  best->has_nan = best->has_finite = 0;
}

// Scores the logits of columns first .. first + width - 1 and keeps the best per lane, in `second` the second best if
// kSecond. A column's id is its index, for a draft plus its d2t. Columns must ascend from call to call.
template <bool kSecond>
static void take(Best* best, Best* second, const float* logits, int first, int width, const int32_t* d2t,
                 float temperature, const Noise& noise) {
  Vec score = load(best->score), second_score = zero();
  IVec id = iload(best->id), second_id = id;
  if constexpr (kSecond) second_score = load(second->score), second_id = iload(second->id);
  for (int i = 0; i < width; i += 16) {
    const uint32_t* offsets = d2t == nullptr ? nullptr : (const uint32_t*)d2t + first + i;
    Vec x;
    uint32_t offset[16] = {};
    if (i + 16 <= width) {
      x = load(logits + i);
    } else {
      float lane[16];
      for (int j = 0; j < 16; j++) lane[j] = i + j < width ? logits[i + j] : -kInfinity;
      for (int j = 0; offsets != nullptr && i + j < width; j++) offset[j] = offsets[j];
      x = load(lane), offsets = offset;
    }
    IVec ids = iadd(iota(), iset1(first + i));
    if (offsets != nullptr) ids = iadd(ids, iload(offsets));
    best->has_nan |= any(is_nan(x));
    best->has_finite |= any(both(less(set1(-kInfinity), x), less(x, set1(kInfinity))));
    if (temperature > 0.0f) x = add(div(x, set1(temperature)), gumbel(noise, ids));
    const auto better = less(score, x);
    if constexpr (kSecond) {
      const auto next = less(second_score, x);
      second_id = iselect(better, id, iselect(next, ids, second_id));
      second_score = select(better, score, select(next, x, second_score));
    }
    score = select(better, x, score), id = iselect(better, ids, id);
  }
  store(best->score, score), istore(best->id, id);
  if constexpr (kSecond) store(second->score, second_score), istore(second->id, second_id);
}

struct Entry {
  float score;
  int32_t id;
};

AQ_INLINE bool before(Entry a, Entry b) { return a.score > b.score || (a.score == b.score && a.id < b.id); }

// The two best of the entries offered, whose ids differ; an id of -1: there is none.
struct BestTwo {
  Entry first{-kInfinity, -1}, second{-kInfinity, -1};

  void offer(Entry entry) {
    if (first.id < 0 || before(entry, first)) second = first, first = entry;
    else if (second.id < 0 || before(entry, second)) second = entry;
  }
};

// The best over all lanes of all workers' states, which are `stride` apart, with `second` (or NULL) the second best
// too; the lowest id among equals; none if a logit is NaN or none is finite.
static BestTwo settle(const Best* best, const Best* second, int count, size_t stride) {
  BestTwo found;
  bool has_nan = false, has_finite = false;
  for (int w = 0; w < count; w++) {
    has_nan |= best[w * stride].has_nan, has_finite |= best[w * stride].has_finite;
    const Best* const kept[] = {best, second};
    for (const Best* states : kept)
      for (int i = 0; states != nullptr && i < 16; i++) {
        const Best& state = states[w * stride];
        if (state.id[i] != 0xffffffff) found.offer(Entry{state.score[i], (int32_t)state.id[i]});
      }
  }
  return has_nan || !has_finite ? BestTwo{} : found;
}

// A heap with the best entry on top: cheaper than sorting where only the first few are wanted.
struct Heap {
  Entry* entries;
  int count;

  void sift(int i) {
    const Entry moving = entries[i];
    for (int child; (child = 2 * i + 1) < count; i = child) {
      if (child + 1 < count && before(entries[child + 1], entries[child])) child++;
      if (!before(entries[child], moving)) break;
      entries[i] = entries[child];
    }
    entries[i] = moving;
  }
  void build() {
    for (int i = count / 2 - 1; i >= 0; i--) sift(i);
  }
  Entry pop() {
    const Entry top = entries[0];
    entries[0] = entries[--count];
    if (count > 0) sift(0);
    return top;
  }
};

// One row of scores [padded(vocab)], the padding -inf, with the maximum of each chunk.
struct Ranking {
  const float* scores;
  int vocab;
  float* maxima;   // [padded / kChunk]
  Entry* entries;  // [padded]
  float top;

  void scan() {
    Vec all = set1(-kInfinity);
    for (int c = 0; c * kChunk < vocab; c++) {
      Vec m = load(scores + c * kChunk);
      for (int i = 16; i < kChunk; i += 16) m = max(m, load(scores + c * kChunk + i));
      maxima[c] = max_lanes(m);
      all = max(all, m);
    }
    top = max_lanes(all);
  }

  // Sum of exp(score - top): 16 partial sums, each in order.
  float mass() const {
    Vec sum = zero();
    for (int i = 0; i < vocab; i += 16) sum = add(sum, exp(sub(load(scores + i), set1(top))));
    return sum_lanes(sum);
  }

  // At least k scores are not below the k-th best chunk maximum.
  float bound(int k) const {
    Heap heap{entries, padded(vocab) / kChunk};
    if (k > heap.count) return -kInfinity;
    for (int c = 0; c < heap.count; c++) entries[c] = Entry{maxima[c], c};
    heap.build();
    for (int i = 1; i < k; i++) heap.pop();
    return heap.entries[0].score;
  }

  Heap above(float bound) const {
    Heap heap{entries, 0};
    for (int c = 0; c * kChunk < vocab; c++) {
      if (maxima[c] < bound) continue;
      for (int i = c * kChunk; i < (c + 1) * kChunk && i < vocab; i++)
        if (!(scores[i] < bound)) entries[heap.count++] = Entry{scores[i], i};
    }
    heap.build();
    return heap;
  }

  Heap best(int k) const {
    const Heap heap = above(bound(k));
    return heap.count >= k ? heap : above(-kInfinity);  // NaNs can spoil the bound
  }

  // The rank of an id among all ids, from 1. Padding ranks behind every id.
  int rank(int id) const {
    const Entry entry{scores[id], id};
    int place = 1;
    for (int c = 0; c * kChunk < vocab; c++) {
      if (maxima[c] < entry.score) continue;
      for (int i = c * kChunk; i < (c + 1) * kChunk; i++) place += before(Entry{scores[i], i}, entry);
    }
    return place;
  }
};

AQ_INLINE bool has_filter(const AqSampling* s, int i, int vocab) {
  return s[i].temperature > 0.0f && ((s[i].top_k > 0 && s[i].top_k < vocab) || s[i].top_p < 1.0f || s[i].min_p > 0.0f);
}

// Gumbel-argmax over what the filters kept; count is rounded up to 16 with scores of -inf.
static BestTwo best_of_kept(const float* score, const uint32_t* id, int count, const Noise& noise) {
  BestTwo best;
  for (int i = 0; i < count; i += 16) {
    float lane[16];
    store(lane, add(load(score + i), gumbel(noise, iload(id + i))));
    for (int j = 0; j < 16 && i + j < count; j++) best.offer(Entry{lane[j], (int32_t)id[i + j]});
  }
  return best;
}

// Draws from one row with top-k, then top-p, then min-p. workspace: 6 * padded floats and a chunk.
static BestTwo draw_filtered(const float* logits, int vocab, const int32_t* d2t, const AqSampling* s, int row,
                             float* workspace) {
  const int width = padded(vocab);
  float* scaled = workspace;
  float* kept_score = scaled + width;
  uint32_t* kept_id = (uint32_t*)(kept_score + width);
  Ranking ranking{scaled, vocab, (float*)kept_id + width, nullptr, 0.0f};
  ranking.entries = (Entry*)(ranking.maxima + width);
  bool has_nan = false, has_finite = false;
  for (int i = 0; i < vocab; i++) {
    has_nan |= logits[i] != logits[i], has_finite |= __builtin_fabsf(logits[i]) < kInfinity;
    scaled[i] = logits[i] / s[row].temperature;
  }
  for (int i = vocab; i < width; i++) scaled[i] = -kInfinity;
  if (has_nan || !has_finite) return {};
  ranking.scan();

  const bool cut_k = s[row].top_k > 0 && s[row].top_k < vocab, cut_p = s[row].top_p < 1.0f;
  const int limit = cut_k ? s[row].top_k : vocab;
  const float min_score = s[row].min_p > 0.0f ? ranking.top + log1(s[row].min_p) : -kInfinity;
  double mass = 0.0;
  float bound = min_score;
  Heap heap{nullptr, 0};
  if (cut_k) {
    heap = ranking.best(limit);
  } else {
    if (cut_p) {
      // What is less probable than (1 - top_p) / 2 / vocab weighs too little in all to reach into the nucleus.
      mass = ranking.mass();
      const float share = (float)(0.5 * (1.0 - (double)s[row].top_p) * mass / vocab);
      const float tail = share > 1e-37f ? ranking.top + log1(share) : -kInfinity;
      bound = tail > bound ? tail : bound;
    }
    heap = ranking.above(bound);
  }
  if (cut_k) {
    for (int i = 0; i < limit; i++) {
      const Entry entry = heap.pop();
      kept_score[i] = entry.score, kept_id[i] = (uint32_t)entry.id;
      mass += exp1(entry.score - ranking.top);
    }
  }
  // In rank order, up to the first id that top-p or min-p drops: both then drop all that follow.
  int kept = 0;
  for (double mass_before = 0.0; kept < limit; kept++) {
    if (!cut_k) {
      if (heap.count == 0) break;
      const Entry entry = heap.pop();
      kept_score[kept] = entry.score, kept_id[kept] = (uint32_t)entry.id;
    }
    const float score = kept_score[kept];
    if (kept > 0 && ((cut_p && mass_before >= s[row].top_p * mass) || score < min_score)) break;
    mass_before += exp1(score - ranking.top);
  }
  for (int i = 0; d2t != nullptr && i < kept; i++) kept_id[i] += d2t[kept_id[i]];
  for (int i = kept; i % 16 != 0; i++) kept_score[i] = -kInfinity, kept_id[i] = 0;
  return best_of_kept(kept_score, kept_id, kept, Noise(s[row].seed, s[row].position));
}

// The final norm and the head over the selected rows of `job`, a DrawJob or a TopKJob.
template <class Job, class Epilogue>
static void head_rows(const Worker& worker, const Job& job, const Epilogue& epilogue) {
  const AqModel& model = *job.model;
  const void* normed =
      norm_rows(worker, job.hidden, job.row_index, job.n, model.final_norm, model.eps, model.head, job.normed);
  linear_rows(model.head, share_blocks(worker, model.head), normed, job.n, epilogue);
}

static void draw(const Worker& worker, const DrawJob& job) {
  const AqSampling* s = job.sampling;
  const size_t width = padded(job.vocab);
  Best* best = job.best + (size_t)worker.index * job.n;
  Best* second = job.second == nullptr ? nullptr : job.second + (size_t)worker.index * job.n;
  for (int i = 0; i < job.n; i++) clear(best + i);
  for (int i = 0; second != nullptr && i < job.n; i++) clear(second + i);
  const auto score = [&](int i, int column, int count, const float* logits) {
    const Noise noise(s[i].seed, s[i].position);
    if (has_filter(s, i, job.vocab)) {
      if (job.model != nullptr) memcpy(job.logits + i * width + column, logits, count * sizeof(float));
    } else if (second != nullptr) {
      take<true>(best + i, second + i, logits, column, count, job.d2t, s[i].temperature, noise);
    } else {
      take<false>(best + i, nullptr, logits, column, count, job.d2t, s[i].temperature, noise);
    }
  };
  if (job.model != nullptr) {
    head_rows(worker, job, score);
  } else {
    const Share chunks = share(worker, (int)width / kChunk);
    const int begin = chunks.begin * kChunk, end = chunks.end * kChunk < job.vocab ? chunks.end * kChunk : job.vocab;
    for (int i = 0; i < job.n && begin < end; i++)
      score(i, begin, end - begin, job.given_logits + (size_t)i * job.vocab + begin);
  }
  worker.barrier();
  for (int i = worker.index; i < job.n; i += worker.count) {
    const float* logits = job.model != nullptr ? job.logits + i * width : job.given_logits + (size_t)i * job.vocab;
    const BestTwo found =
        has_filter(s, i, job.vocab)
            ? draw_filtered(logits, job.vocab, job.d2t, s, i, job.workspace + worker.index * job.workspace_floats)
            : settle(job.best + i, second == nullptr ? nullptr : job.second + i, worker.count, job.n);
    job.tokens[i] = found.first.id;
    if (second == nullptr) continue;
    job.runners_up[i] = found.second.score > -kInfinity ? found.second.id : -1;
    job.margins[i] = found.first.id < 0 ? 0.0f : found.first.score - found.second.score;
  }
}

// Turns logits into the scores of a draw: logit / temperature + noise of its id. A draw takes the largest score.
static void perturb(float* logits, int vocab, const int32_t* d2t, const AqSampling& s) {
  const Noise noise(s.seed, s.position);
  for (int i = 0; i < vocab; i += 16) {  // the last lanes are padding, -inf
    uint32_t ids[16] = {};
    for (int j = 0; j < 16 && i + j < vocab; j++) ids[j] = i + j + (d2t == nullptr ? 0 : d2t[i + j]);
    store(logits + i, add(div(load(logits + i), set1(s.temperature)), gumbel(noise, iload(ids))));
  }
}

static void head_logits(const Worker& worker, const TopKJob& job) {
  head_rows(worker, job, [&](int i, int column, int count, const float* logits) {
    memcpy(job.logits + (size_t)i * job.model->head.n + column, logits, count * sizeof(float));
  });
}

static void head_topk(const Worker& worker, const TopKJob& job) {
  const int vocab = job.model->head.n, width = padded(vocab);
  head_rows(worker, job, [&](int i, int column, int count, const float* logits) {
    memcpy(job.logits + (size_t)i * width + column, logits, count * sizeof(float));
  });
  worker.barrier();
  for (int i = worker.index; i < job.n; i += worker.count) {
    float* logits = job.logits + (size_t)i * width;
    for (int j = vocab; j < width; j++) logits[j] = -kInfinity;
    if (job.sampling != nullptr && job.sampling[i].temperature > 0.0f) perturb(logits, vocab, job.d2t, job.sampling[i]);
    float* maxima = job.workspace + worker.index * job.workspace_floats;
    Ranking ranking{logits, vocab, maxima, (Entry*)(maxima + width), 0.0f};
    ranking.scan();
    // If a logit is NaN or +inf, or none is finite, the mass is NaN. All log-probabilities are then this one NaN, whose
    // bits are the same on every CPU.
    const float mass = ranking.mass(), normalizer = log1(mass);
    const auto logprob = [&](float score) {
      return mass != mass ? __builtin_nanf("") : score - ranking.top - normalizer;
    };
    if (job.chosen != nullptr) {
      job.chosen_logprobs[i] = logprob(logits[job.chosen[i]]);
      job.ranks[i] = ranking.rank(job.chosen[i]);
    }
    Heap heap = ranking.best(job.k);
    for (int j = 0; j < job.k; j++) {
      const Entry entry = heap.pop();
      job.ids[(size_t)i * job.k + j] = entry.id + (job.d2t == nullptr ? 0 : job.d2t[entry.id]);
      job.logprobs[(size_t)i * job.k + j] = logprob(entry.score);
    }
  }
}

}  // namespace AQ_NAMESPACE
