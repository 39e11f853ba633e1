#include "rules.h"

#include <math.h>

#include <algorithm>

namespace aq {

void Rules::start(const AqAdmit& admit, int vocab) {
  repetition_ = admit.repetition_penalty, presence_ = admit.presence_penalty, frequency_ = admit.frequency_penalty;
  has_penalties_ = repetition_ != 1.0f || presence_ != 0.0f || frequency_ != 0.0f;
  num_prompt_ = admit.num_prompt, min_tokens_ = admit.min_tokens;
  biases_.clear(), end_tokens_.assign(admit.end_tokens, admit.end_tokens + admit.num_end_tokens);
  for (int i = 0; i < admit.num_biases; i++) biases_.push_back({admit.bias_tokens[i], admit.biases[i]});
  bad_words_.clear();
  for (int at = 0; at < admit.bad_words_size; at += 1 + admit.bad_words[at]) {
    const int32_t* word = admit.bad_words + at + 1;
    bad_words_.emplace_back(word, word + admit.bad_words[at]);
  }
  known_.clear(), counts_.clear(), touched_.clear();
  if (!has_penalties_) return;
  counts_.resize(vocab), touched_.resize(vocab);
  for (int i = 0; i < num_prompt_; i++) touch(admit.tokens[i]);
  for (int i = num_prompt_; i < admit.num_tokens; i++) count(admit.tokens[i]);
}

void Rules::touch(int token) {
  if (!touched_[token]) touched_[token] = 1, known_.push_back(token);
}

void Rules::count(int token) {
  if (!has_penalties_) return;
  touch(token);
  counts_[token]++;
}

bool Rules::ends(int token) const {
  return std::find(end_tokens_.begin(), end_tokens_.end(), token) != end_tokens_.end();
}

// Applies the penalties in this order: repetition, presence, frequency, each as a float32 operation of its own. A token
// that does not occur before the draw keeps its logit.
void Rules::penalise(const Before& before, float* logits) {
  const size_t num_known = known_.size();
  for (const int token : before.path) count(token);
  for (const int token : known_) {
    const float seen = (float)counts_[token];
    float x = logits[token];
    if (repetition_ != 1.0f) x = x > 0.0f ? x / repetition_ : x * repetition_;
    x -= presence_ * (counts_[token] > 0 ? 1.0f : 0.0f);
    logits[token] = x - frequency_ * seen;
  }
  for (const int token : before.path) counts_[token]--;
  for (size_t i = num_known; i < known_.size(); i++) touched_[known_[i]] = 0;
  known_.resize(num_known);
}

void Rules::apply(const Before& before, float* logits) {
  if (has_penalties_) penalise(before, logits);
  for (const Bias& bias : biases_) logits[bias.token] += bias.value;
  if (before.size() - num_prompt_ < min_tokens_)
    for (const int token : end_tokens_) logits[token] = -INFINITY;
  for (const auto& word : bad_words_) {
    const int length = (int)word.size() - 1;
    bool stands = length <= before.size();
    for (int i = 0; stands && i < length; i++) stands = before.back(i) == word[length - 1 - i];
    if (stands) logits[word[length]] = -INFINITY;
  }
}

void apply_mask(const uint32_t* mask, int vocab, float* logits) {
  for (int token = 0; token < vocab; token++)
    if (!(mask[token / 32] >> token % 32 & 1)) logits[token] = -INFINITY;
}

bool allows_all(const uint32_t* mask, int vocab) {
  for (int word = 0; word < vocab / 32; word++)
    if (mask[word] != 0xffffffff) return false;
  const uint32_t rest = (1u << vocab % 32) - 1;
  return vocab % 32 == 0 || (mask[vocab / 32] & rest) == rest;
}

}  // namespace aq
