// Rules that change a slot's logits before a token is drawn: penalties, bias, forbidden tokens. They depend on the
// tokens of the row's own path only.
#pragma once
#include <vector>

#include "stages.h"

namespace aq {

// The tokens before a draw: the slot's history, then the drafted tokens of the row's path.
struct Before {
  const int32_t* history;
  int num_history;
  std::vector<int32_t> path;

  int size() const { return num_history + (int)path.size(); }
  int back(int i) const {  // the i-th last one
    const int drafted = (int)path.size();
    return i < drafted ? path[drafted - 1 - i] : history[num_history - 1 - (i - drafted)];
  }
};

class Rules {
 public:
  void start(const AqAdmit& admit, int vocab);
  bool any() const { return has_penalties_ || min_tokens_ > 0 || !biases_.empty() || !bad_words_.empty(); }
  void count(int token);  // adds an output token
  bool ends(int token) const;  // whether a sequence ends with this token wherever it stands
  void apply(const Before& before, float* logits);

 private:
  struct Bias {
    int32_t token;
    float value;
  };

  void penalise(const Before& before, float* logits);
  void touch(int token);

  bool has_penalties_ = false;
  float repetition_ = 1.0f, presence_ = 0.0f, frequency_ = 0.0f;
  int num_prompt_ = 0, min_tokens_ = 0;
  std::vector<Bias> biases_;
  std::vector<int32_t> end_tokens_;
  std::vector<std::vector<int32_t>> bad_words_;
  std::vector<int32_t> counts_;   // [vocab], of output tokens; empty without penalties
  std::vector<uint8_t> touched_;  // [vocab]: whether `known_` has it
  std::vector<int32_t> known_;    // tokens of prompt and output, each once
};

// Forbids the tokens whose bit in the mask is 0.
void apply_mask(const uint32_t* mask, int vocab, float* logits);
bool allows_all(const uint32_t* mask, int vocab);

}  // namespace aq
