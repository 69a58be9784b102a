// The entry point of decoding.
#include "decode.h"
#include "run.h"

extern "C" int rfa_decode(const rfa::Problem* p) { return rfa::run<rfa::Decode>(*p); }
