// The calls of lookup.h: checks, and the copy behind a match.
#include "lookup.h"

#include <new>

#include "api/check.h"
#include "suffix_automaton.h"

using namespace aq;

struct AqIndex {
  SuffixAutomaton automaton;
  MatchEvents events;
};

namespace {

constexpr int kMostTokens = 1 << 28;

// Checks the call, and makes room for its tokens.
int prepare(AqIndex* index, const int32_t* tokens, int32_t num_tokens) {
  AQ_TRY(check_pointer("index", index, alignof(AqIndex)));
  const int held = index->automaton.num_tokens();
  AQ_REQUIRE(num_tokens >= 0 && num_tokens <= kMostTokens - held, "num_tokens=%d: must be in [0, %d]", num_tokens,
             kMostTokens - held);
  if (num_tokens > 0) AQ_TRY(check_pointer("tokens", tokens, sizeof(int32_t)));
  for (int i = 0; i < num_tokens; i++)
    AQ_REQUIRE(tokens[i] >= AQ_SEPARATOR, "tokens[%d]=%d: must be an id, or %d", i, tokens[i], AQ_SEPARATOR);
  AQ_REQUIRE(index->automaton.reserve(held + num_tokens), "out of memory: an index of %d tokens", held + num_tokens);
  return 0;
}

// A copy that reaches the text's end goes on from the copy's beginning: such a text repeats itself.
void copy(const AqIndex& index, int max_tokens, double least, AqCopy* out) {
  const SuffixAutomaton& text = index.automaton;
  int state = text.match();
  out->length = text.length(state), out->occurrences = state == 0 ? 0 : text.count(state), out->num_tokens = 0;
  if (state == 0) return;
  int count = out->occurrences;
  const int begin = text.end(state) + 1;
  int place = begin;
  double chance = 1.0;
  for (int i = 0; i < max_tokens; i++) {
    // If the tokens before it are accepted, the match is i tokens longer, and stood there as often as its state says.
    chance *= index.events.estimate(out->length + i, count);
    const int32_t token = text.token(place);
    if (chance < least || token == AQ_SEPARATOR) return;
    out->tokens[i] = token, out->chances[i] = chance, out->num_tokens = i + 1;
    if (state != 0) state = text.next(state, token);
    if (state != 0) count = text.count(state);
    if (++place == text.num_tokens()) place = begin;
  }
}

}  // namespace

AqIndex* aq_open_index(int32_t min_length, const AqMatchEvents* events) {
  const auto check = [&] {
    AQ_REQUIRE(min_length >= 1, "min_length=%d: must be at least 1", min_length);
    AQ_TRY(check_pointer("events", events, alignof(AqMatchEvents)));
    AQ_TRY(check_pointer("trials", events->trials, sizeof(int32_t)));
    AQ_TRY(check_pointer("hits", events->hits, sizeof(int32_t)));
    return check_pointer("estimates", events->estimates, sizeof(double));
  };
  if (check() != 0) return nullptr;
  AqIndex* index = new (std::nothrow) AqIndex{SuffixAutomaton(min_length), MatchEvents(*events)};
  if (index == nullptr || !index->automaton.reserve(1)) {
    fail("out of memory: an index");
    delete index;
    return nullptr;
  }
  return index;
}

int aq_close_index(AqIndex* index) {
  delete index;
  return 0;
}

int64_t aq_index_bytes(const AqIndex* index) {
  AQ_TRY(check_pointer("index", index, alignof(AqIndex)));
  return (int64_t)sizeof(AqIndex) + index->automaton.num_bytes();
}

int aq_extend_index(AqIndex* index, const int32_t* tokens, int32_t num_tokens) {
  AQ_TRY(prepare(index, tokens, num_tokens));
  for (int i = 0; i < num_tokens; i++) index->automaton.append(tokens[i], nullptr);
  return 0;
}

int aq_propose(AqIndex* index, const int32_t* tokens, int32_t num_tokens, int32_t max_tokens, double least,
               AqCopy* out) {
  AQ_REQUIRE(max_tokens >= 0 && max_tokens <= AQ_MAX_DEPTH, "max_tokens=%d: must be in [0, %d]", max_tokens,
             AQ_MAX_DEPTH);
  AQ_TRY(check_pointer("copy", out, alignof(AqCopy)));
  AQ_TRY(prepare(index, tokens, num_tokens));
  for (int i = 0; i < num_tokens; i++) index->automaton.append(tokens[i], &index->events);
  copy(*index, max_tokens, least, out);
  return 0;
}
