// The operations of expressions; only for expression*.cpp.
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

  // The types of an operation's operands and result.
  enum Rule {
    kLeaf,        // ["number", name] and the like; no operands
    kArithmetic,  // numbers; float if one is
    kIntegers,    // integers
    kFloats,      // numbers; the result is a float
    kCompare,     // numbers; the result is a bool
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
