// A suffix automaton of a growing text, as spec/suffix_automaton.py describes it: its readable twin, name by name.
//
// Memory is taken for a capacity of tokens, in `reserve` alone, and nothing else can fail. n tokens have at most 2 n
// states, the root included, and n branches. For the edges of the automaton that are on no longest path from the root
// each end another suffix of the text, so there are below n of them; the other edges lead to one state each; and all
// states but the last one have an edge that is no branch. So a token of the capacity takes 4 + 2 * 32 + 4 / 3 * 16
// bytes, and there are at most 1.5 tokens of capacity a token.
#pragma once
#include <stdint.h>

#include <memory>

#include "lookup.h"

namespace aq {

// The caller's counts of matches that were right: MatchEvents in spec/match_events.py.
class MatchEvents {
 public:
  explicit MatchEvents(const AqMatchEvents& own) : own_(own) {}
  void add(int length, int count, bool is_hit);
  double estimate(int length, int count) const;

 private:
  AqMatchEvents own_;
};

// State 0, the root, is the empty text; where a state is asked for, 0 says that there is none.
class SuffixAutomaton {
 public:
  explicit SuffixAutomaton(int min_length) : min_length_(min_length) {}
  // Makes room for so many tokens in all. False: out of memory, and nothing has changed.
  bool reserve(int num_tokens);
  // Appends a token, for which there is room. events: told whether the match before it was right; NULL: nobody is.
  void append(int32_t token, MatchEvents* events);

  int match() const;  // the state of the longest suffix that stood in the text before with a token behind it
  int next(int state, int32_t token) const;  // the state of a state's longest substring with `token` behind it

  int num_tokens() const { return num_tokens_; }
  int32_t token(int at) const { return text_[at]; }
  int length(int state) const { return states_[state].length; }
  int count(int state) const { return states_[state].count; }
  int end(int state) const { return states_[state].end; }
  int64_t num_bytes() const;

 private:
  // token: the one that followed the state first, and target the state behind both. branches: the first of the state's
  // other tokens.
  struct alignas(32) State {  // never on two cache lines
    int32_t length, link, count, end, token, target, branches;
  };
  // A token that followed a state, and the state behind both; next: another branch of the state. A free place has the
  // target 0, which nothing leads to.
  struct Branch {
    int32_t state, token, target, next;
  };

  int place_of(int state, int32_t token) const;
  void fill(int place, int state, int32_t token, int target);
  void tell(MatchEvents& events, int state, int32_t token) const;
  int split(int whole, int state, int32_t token);

  int min_length_;
  int capacity_ = 0, num_tokens_ = 0, num_states_ = 1, num_places_ = 0;
  int last_ = 0;  // the state of the whole text
  std::unique_ptr<int32_t[]> text_;
  std::unique_ptr<State[]> states_;
  std::unique_ptr<Branch[]> places_;  // of all branches: a hash table with linear probing, at most 3/4 full
};

}  // namespace aq
