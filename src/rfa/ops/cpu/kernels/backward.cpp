// The entry point of the gradients.
#include "backward.h"
#include "run.h"

extern "C" int rfa_backward(const rfa::Problem* p) { return rfa::run<rfa::Backward>(*p); }
