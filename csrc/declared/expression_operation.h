// The operations that an expression is made of: only for expression*.cpp.
#pragma once

namespace torch_cubin {

struct ExpressionOperation {
  enum Code {
    kNumber,
    kSize,
    kStride,
    kNumel,
    kDim,
    kItemsize,
    kDefined,
    kContiguous,
    kIsDtype,
    kIs,
    kSm,
    kMultiprocessors,
    kAdd,
    kSub,
    kMul,
    kFloorDiv,
    kMod,
    kTrueDiv,
    kMin,
    kMax,
    kNeg,
    kAbs,
    kNextPower,
    kSqrt,
    kFloat,
    kLess,
    kLessEqual,
    kEqual,
    kNotEqual,
    kAnd,
    kOr,
    kNot,
    kSelect,
  };

  // What an operation's operands may be, and what it gives.
  enum Rule {
    kLeaf,        // ["number", name] and the like; no operands
    kArithmetic,  // numbers; float if one is
    kIntegers,    // integers
    kFloats,      // numbers; gives a float
    kCompare,     // numbers; gives a bool
    kLogic,       // bools
    kChoice,      // a bool, and two of one type, or numbers
  };

  const char* name;
  Code code;
  Rule rule;
  int operands;
  const char* symbol;  // in text
};

}  // namespace torch_cubin
