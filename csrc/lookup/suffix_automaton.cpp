#include "suffix_automaton.h"

#include <algorithm>
#include <new>
#include <utility>

namespace aq {
namespace {

constexpr int kNone = -2;        // the token of a state that none followed
constexpr int kNoBranch = -1;
constexpr int kMaxSettled = 32;  // links whose counts a token may raise: MAX_SETTLED of the twin
constexpr int kLeastCapacity = 64;

// MatchEvents of the twin: where a bucket begins that has no end, and after how many events half are forgotten.
constexpr int kLongest = 64, kOftenest = 8, kMaxTrials = 1024;

constexpr int num_bits(int number) { return number == 0 ? 0 : 32 - __builtin_clz((unsigned)number); }

constexpr int cell_of(int length, int count) {
  return num_bits(std::min(length, kLongest)) * (num_bits(kOftenest) + 1) + num_bits(std::min(count, kOftenest));
}

static_assert(cell_of(kLongest, kOftenest) + 1 == AQ_MATCH_CELLS);

}  // namespace

double MatchEvents::estimate(int length, int count) const { return own_.estimates[cell_of(length, count)]; }

void MatchEvents::add(int length, int count, bool is_hit) {
  const int cell = cell_of(length, count);
  int32_t &trials = own_.trials[cell], &hits = own_.hits[cell];
  trials++, hits += is_hit;
  if (trials == kMaxTrials) trials /= 2, hits /= 2;
  own_.estimates[cell] = (hits + 1.0) / (trials + 2.0);
}

bool SuffixAutomaton::reserve(int num_tokens) {
  if (num_tokens <= capacity_) return true;
  const int capacity = std::max({num_tokens, capacity_ + capacity_ / 2, kLeastCapacity});
  const int num_places = capacity + capacity / 3 + 1;
  std::unique_ptr<int32_t[]> text(new (std::nothrow) int32_t[capacity]);
  std::unique_ptr<State[]> states(new (std::nothrow) State[2 * (size_t)capacity]);
  std::unique_ptr<Branch[]> places(new (std::nothrow) Branch[num_places]());
  if (text == nullptr || states == nullptr || places == nullptr) return false;
  if (capacity_ == 0) {
    states[0] = {0, -1, 0, -1, kNone, 0, kNoBranch};
  } else {
    std::copy_n(text_.get(), num_tokens_, text.get());
    std::copy_n(states_.get(), num_states_, states.get());
    for (int state = 0; state < num_states_; state++) states[state].branches = kNoBranch;
  }
  text_ = std::move(text), states_ = std::move(states), places_.swap(places);
  const int num_before = std::exchange(num_places_, num_places);
  for (int i = 0; i < num_before; i++)
    if (const Branch& b = places[i]; b.target != 0) fill(place_of(b.state, b.token), b.state, b.token, b.target);
  capacity_ = capacity;
  return true;
}

void SuffixAutomaton::append(int32_t token, MatchEvents* events) {
  const int at = num_tokens_++, last = last_, whole = num_states_++;
  // The suffixes of the text so far become earlier ones. Before the first token there is the root alone.
  int state = std::max(states_[last].link, 0);
  if (states_[state].length >= min_length_) {
    if (events != nullptr) tell(*events, state, token);
    for (int i = 0; i < kMaxSettled && states_[state].length >= min_length_; i++) {
      states_[state].count++, states_[state].end = at - 1;
      state = states_[state].link;
    }
  }
  text_[at] = token;
  states_[whole] = {states_[last].length + 1, 0, 1, at, kNone, 0, kNoBranch};
  last_ = whole;
  // Every suffix that no token like this one followed is now followed by it.
  for (state = last; state >= 0; state = states_[state].link) {
    State& suffix = states_[state];
    int found = whole;
    if (suffix.token == token) {
      found = suffix.target;
    } else if (suffix.token == kNone) {
      suffix.token = token, suffix.target = whole;
    } else if (const int place = place_of(state, token); places_[place].target != 0) {
      found = places_[place].target;
    } else {
      fill(place, state, token, whole);
    }
    if (found == whole) continue;
    states_[whole].link = states_[found].length == suffix.length + 1 ? found : split(found, state, token);
    return;
  }
}

int SuffixAutomaton::match() const {
  int state = std::max(states_[last_].link, 0);
  while (states_[state].length >= min_length_ && text_[states_[state].end + 1] == AQ_SEPARATOR)
    state = states_[state].link;
  return states_[state].length >= min_length_ ? state : 0;
}

int SuffixAutomaton::next(int state, int32_t token) const {
  if (states_[state].token == token) return states_[state].target;
  return states_[state].branches == kNoBranch ? 0 : places_[place_of(state, token)].target;
}

int64_t SuffixAutomaton::num_bytes() const {
  return (int64_t)capacity_ * (sizeof(int32_t) + 2 * sizeof(State)) + (int64_t)num_places_ * sizeof(Branch);
}

// Tells of the token behind the match, which is `state` or a suffix of it.
void SuffixAutomaton::tell(MatchEvents& events, int state, int32_t token) const {
  int32_t foretold = text_[states_[state].end + 1];
  if (foretold == AQ_SEPARATOR) {
    state = match();
    if (state == 0) return;
    foretold = text_[states_[state].end + 1];
  }
  events.add(states_[state].length, states_[state].count, foretold == token);
}

// Of the substrings of `whole`, those that are `state` or its suffixes with `token` behind them stand at one place more
// than the others from now on. Gives them a state of their own and returns it.
int SuffixAutomaton::split(int whole, int state, int32_t token) {
  const int part = num_states_++;
  states_[part] = states_[whole];
  states_[part].length = states_[state].length + 1, states_[part].branches = kNoBranch;
  for (int i = states_[whole].branches; i != kNoBranch; i = places_[i].next)
    fill(place_of(part, places_[i].token), part, places_[i].token, places_[i].target);
  states_[whole].link = part;
  for (; state >= 0; state = states_[state].link) {
    State& suffix = states_[state];
    int& target = suffix.token == token ? suffix.target : places_[place_of(state, token)].target;
    if (target != whole) break;
    target = part;
  }
  return part;
}

// Where a branch stands, or the free place for it.
int SuffixAutomaton::place_of(int state, int32_t token) const {
  const uint64_t key = (uint64_t)state << 32 | (uint32_t)token;
  const uint64_t mixed = key * 0x9e3779b97f4a7c15u >> 32;  // 2^64 over the golden ratio
  int place = (int)(mixed * (uint64_t)num_places_ >> 32);
  while (places_[place].target != 0 && (places_[place].state != state || places_[place].token != token))
    if (++place == num_places_) place = 0;
  return place;
}

void SuffixAutomaton::fill(int place, int state, int32_t token, int target) {
  places_[place] = {state, token, target, states_[state].branches};
  states_[state].branches = place;
}

}  // namespace aq
