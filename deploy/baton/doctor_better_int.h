/* Inside of doctor_better: the search and the writing of files. */
#pragma once

#include "deploy/baton/doctor_better.h"

enum { BETTER_GROUP = 128 /* weights per scale of the expert files it asks for */ };

/* Fills b->docs. */
void better_write(Better *b, const CeilingCase *c, const BetterGoal *goal);
