// The C interface of drafts that are copied from earlier text: an index of one sequence's text, which says where the
// text's latest tokens stood before and what followed there. spec/text_index.py is its readable twin; both give the
// same results to the bit.
//
// An index belongs to the caller, and so do the events, which several indexes may share and which must outlive them. No
// two calls may work on one index, or on indexes with common events, at the same time. Functions return what
// api/aquiline.h says; out of memory, too, they return -1 and have changed nothing.
#pragma once
#include "stages/stages.h"

#pragma GCC visibility push(default)
#ifdef __cplusplus
extern "C" {
#endif

enum { AQ_SEPARATOR = -1 };  // between two texts of one index: see spec/suffix_automaton.py
enum { AQ_MATCH_CELLS = 40 };  // lengths and counts of matches by buckets: see spec/match_events.py

typedef struct AqIndex AqIndex;

// How often matches foretold the next token: MatchEvents in spec/match_events.py.
typedef struct {
  int32_t *trials, *hits;  // [AQ_MATCH_CELLS]
  double* estimates;  // [AQ_MATCH_CELLS]
} AqMatchEvents;

// Tokens that followed the longest match, and the chance of each to be accepted; of the match its length, 0 if there is
// none, and how often it stood in the text. Entries behind num_tokens are left as they were.
typedef struct {
  int32_t length, occurrences, num_tokens, tokens[AQ_MAX_DEPTH];
  double chances[AQ_MAX_DEPTH];
} AqCopy;

AqIndex* aq_open_index(int32_t min_length, const AqMatchEvents*);  // NULL on failure
int aq_close_index(AqIndex*);
int64_t aq_index_bytes(const AqIndex*);  // that it has allocated

// Appends tokens that tell the events nothing, AQ_SEPARATOR among them.
int aq_extend_index(AqIndex*, const int32_t* tokens, int32_t num_tokens);
// Appends tokens that the target wrote, each of which tells the events whether the match before it was right. Then
// copies up to max_tokens tokens, as long as their chance is at least `least`.
int aq_propose(AqIndex*, const int32_t* tokens, int32_t num_tokens, int32_t max_tokens, double least, AqCopy*);

#ifdef __cplusplus
}
#endif
#pragma GCC visibility pop
