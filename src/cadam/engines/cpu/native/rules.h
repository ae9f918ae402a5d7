/* Made by `python -m cadam.codegen.c` from the rules in cadam/rules: do not edit.
 *
 * An element function for each rule, in terms of `real`, and a list of them. Every option of a rule is a
 * coefficient: a decay of 0, a shrinking by 1, a threshold of NaN below which nothing is held. */

struct COEFFICIENTS(adam) {
    real l2, shrink, unscale, threshold, weight1, beta2, weight2, correct1, correct2, eps, lr;
};

static inline void ELEMENT(adam)(
    const struct COEFFICIENTS(adam) *restrict c, real *p_, real g,
    real *exp_avg_, real *exp_avg_sq_, real *alignment_)
{
    const real p = *p_;
    const real exp_avg = *exp_avg_;
    const real exp_avg_sq = *exp_avg_sq_;
    const real t0 = g * c->unscale;
    const real t1 = SCALED(p, c->l2);
    const real t2 = t0 + t1;
    const real t3 = t2 - exp_avg;
    const real t4 = t3 * c->weight1;
    const real t5 = exp_avg + t4;
    const real t6 = exp_avg_sq * c->beta2;
    const real t7 = t2 * t2;
    const real t8 = t7 * c->weight2;
    const real t9 = t6 + t8;
    const real t10 = t9 * c->correct2;
    const real t11 = t5 * c->correct1;
    const real t12 = SQRT(t10);
    const real t13 = t12 + c->eps;
    const real t14 = t11 / t13;
    const real t15 = SIGN(t2);
    const real t16 = t5 * t15;
    const real t17 = HOLD(t16, t14);
    const real t18 = p * c->shrink;
    const real t19 = t17 * c->lr;
    const real t20 = t18 - t19;
    *p_ = t20;
    *exp_avg_ = t5;
    *exp_avg_sq_ = t9;
    *alignment_ = t16;
}

struct COEFFICIENTS(adam_max_exp_avg_sq) {
    real l2, shrink, unscale, threshold, weight1, beta2, weight2, correct1, correct2, eps, lr;
};

static inline void ELEMENT(adam_max_exp_avg_sq)(
    const struct COEFFICIENTS(adam_max_exp_avg_sq) *restrict c, real *p_, real g,
    real *exp_avg_, real *exp_avg_sq_, real *max_exp_avg_sq_, real *alignment_)
{
    const real p = *p_;
    const real exp_avg = *exp_avg_;
    const real exp_avg_sq = *exp_avg_sq_;
    const real max_exp_avg_sq = *max_exp_avg_sq_;
    const real t0 = g * c->unscale;
    const real t1 = SCALED(p, c->l2);
    const real t2 = t0 + t1;
    const real t3 = t2 - exp_avg;
    const real t4 = t3 * c->weight1;
    const real t5 = exp_avg + t4;
    const real t6 = exp_avg_sq * c->beta2;
    const real t7 = t2 * t2;
    const real t8 = t7 * c->weight2;
    const real t9 = t6 + t8;
    const real t10 = t9 * c->correct2;
    const real t11 = MAXIMUM(max_exp_avg_sq, t10);
    const real t12 = t5 * c->correct1;
    const real t13 = SQRT(t11);
    const real t14 = t13 + c->eps;
    const real t15 = t12 / t14;
    const real t16 = SIGN(t2);
    const real t17 = t5 * t16;
    const real t18 = HOLD(t17, t15);
    const real t19 = p * c->shrink;
    const real t20 = t18 * c->lr;
    const real t21 = t19 - t20;
    *p_ = t21;
    *exp_avg_ = t5;
    *exp_avg_sq_ = t9;
    *max_exp_avg_sq_ = t11;
    *alignment_ = t17;
}

struct COEFFICIENTS(sgdm) {
    real l2, shrink, unscale, threshold, momentum, weight, lr;
};

static inline void ELEMENT(sgdm)(
    const struct COEFFICIENTS(sgdm) *restrict c, real *p_, real g,
    real *momentum_buffer_, real *alignment_)
{
    const real p = *p_;
    const real momentum_buffer = *momentum_buffer_;
    const real t0 = g * c->unscale;
    const real t1 = SCALED(p, c->l2);
    const real t2 = t0 + t1;
    const real t3 = momentum_buffer * c->momentum;
    const real t4 = t2 * c->weight;
    const real t5 = t3 + t4;
    const real t6 = SIGN(t2);
    const real t7 = t5 * t6;
    const real t8 = HOLD(t7, t5);
    const real t9 = p * c->shrink;
    const real t10 = t8 * c->lr;
    const real t11 = t9 - t10;
    *p_ = t11;
    *momentum_buffer_ = t5;
    *alignment_ = t7;
}

struct COEFFICIENTS(sgdm_ahead) {
    real l2, shrink, unscale, threshold, momentum, weight, ahead, lr;
};

static inline void ELEMENT(sgdm_ahead)(
    const struct COEFFICIENTS(sgdm_ahead) *restrict c, real *p_, real g,
    real *momentum_buffer_, real *alignment_)
{
    const real p = *p_;
    const real momentum_buffer = *momentum_buffer_;
    const real t0 = g * c->unscale;
    const real t1 = SCALED(p, c->l2);
    const real t2 = t0 + t1;
    const real t3 = momentum_buffer * c->momentum;
    const real t4 = t2 * c->weight;
    const real t5 = t3 + t4;
    const real t6 = t2 * c->weight;
    const real t7 = t5 * c->ahead;
    const real t8 = t6 + t7;
    const real t9 = SIGN(t2);
    const real t10 = t5 * t9;
    const real t11 = HOLD(t10, t8);
    const real t12 = p * c->shrink;
    const real t13 = t11 * c->lr;
    const real t14 = t12 - t13;
    *p_ = t14;
    *momentum_buffer_ = t5;
    *alignment_ = t10;
}

struct COEFFICIENTS(sgdm_without_momentum_buffer) {
    real l2, shrink, unscale, threshold, momentum, weight, lr;
};

static inline void ELEMENT(sgdm_without_momentum_buffer)(
    const struct COEFFICIENTS(sgdm_without_momentum_buffer) *restrict c, real *p_, real g,
    real *alignment_)
{
    const real p = *p_;
    const real t0 = g * c->unscale;
    const real t1 = SCALED(p, c->l2);
    const real t2 = t0 + t1;
    const real t3 = SIGN(t2);
    const real t4 = t2 * t3;
    const real t5 = HOLD(t4, t2);
    const real t6 = p * c->shrink;
    const real t7 = t5 * c->lr;
    const real t8 = t6 - t7;
    *p_ = t8;
    *alignment_ = t4;
}

struct COEFFICIENTS(lion) {
    real l2, shrink, unscale, threshold, weight1, weight2, lr;
};

static inline void ELEMENT(lion)(
    const struct COEFFICIENTS(lion) *restrict c, real *p_, real g,
    real *exp_avg_, real *alignment_)
{
    const real p = *p_;
    const real exp_avg = *exp_avg_;
    const real t0 = g * c->unscale;
    const real t1 = SCALED(p, c->l2);
    const real t2 = t0 + t1;
    const real t3 = t2 - exp_avg;
    const real t4 = t3 * c->weight1;
    const real t5 = exp_avg + t4;
    const real t6 = t3 * c->weight2;
    const real t7 = exp_avg + t6;
    const real t8 = SIGN(t5);
    const real t9 = t5 - t5;
    const real t10 = t8 + t9;
    const real t11 = SIGN(t2);
    const real t12 = t5 * t11;
    const real t13 = HOLD(t12, t10);
    const real t14 = p * c->shrink;
    const real t15 = t13 * c->lr;
    const real t16 = t14 - t15;
    *p_ = t16;
    *exp_avg_ = t7;
    *alignment_ = t12;
}

struct COEFFICIENTS(radam) {
    real l2, shrink, unscale, threshold, weight1, beta2, weight2, plain, adaptive, eps, lr;
};

static inline void ELEMENT(radam)(
    const struct COEFFICIENTS(radam) *restrict c, real *p_, real g,
    real *exp_avg_, real *exp_avg_sq_, real *alignment_)
{
    const real p = *p_;
    const real exp_avg = *exp_avg_;
    const real exp_avg_sq = *exp_avg_sq_;
    const real t0 = g * c->unscale;
    const real t1 = SCALED(p, c->l2);
    const real t2 = t0 + t1;
    const real t3 = t2 - exp_avg;
    const real t4 = t3 * c->weight1;
    const real t5 = exp_avg + t4;
    const real t6 = exp_avg_sq * c->beta2;
    const real t7 = t2 * t2;
    const real t8 = t7 * c->weight2;
    const real t9 = t6 + t8;
    const real t10 = t5 * c->plain;
    const real t11 = t5 * c->adaptive;
    const real t12 = SQRT(t9);
    const real t13 = t12 + c->eps;
    const real t14 = t11 / t13;
    const real t15 = t10 + t14;
    const real t16 = SIGN(t2);
    const real t17 = t5 * t16;
    const real t18 = HOLD(t17, t15);
    const real t19 = p * c->shrink;
    const real t20 = t18 * c->lr;
    const real t21 = t19 - t20;
    *p_ = t21;
    *exp_avg_ = t5;
    *exp_avg_sq_ = t9;
    *alignment_ = t17;
}

struct COEFFICIENTS(yogi) {
    real l2, shrink, unscale, threshold, weight1, beta2, weight2, correct1, correct2, eps, lr;
};

static inline void ELEMENT(yogi)(
    const struct COEFFICIENTS(yogi) *restrict c, real *p_, real g,
    real *exp_avg_, real *exp_avg_sq_, real *alignment_)
{
    const real p = *p_;
    const real exp_avg = *exp_avg_;
    const real exp_avg_sq = *exp_avg_sq_;
    const real t0 = g * c->unscale;
    const real t1 = SCALED(p, c->l2);
    const real t2 = t0 + t1;
    const real t3 = t2 - exp_avg;
    const real t4 = t3 * c->weight1;
    const real t5 = exp_avg + t4;
    const real t6 = t2 * t2;
    const real t7 = exp_avg_sq - t6;
    const real t8 = SIGN(t7);
    const real t9 = t8 * t6;
    const real t10 = t9 * c->weight2;
    const real t11 = exp_avg_sq - t10;
    const real t12 = t5 * c->correct1;
    const real t13 = t11 * c->correct2;
    const real t14 = SQRT(t13);
    const real t15 = t14 + c->eps;
    const real t16 = t12 / t15;
    const real t17 = SIGN(t2);
    const real t18 = t5 * t17;
    const real t19 = HOLD(t18, t16);
    const real t20 = p * c->shrink;
    const real t21 = t19 * c->lr;
    const real t22 = t20 - t21;
    *p_ = t22;
    *exp_avg_ = t5;
    *exp_avg_sq_ = t11;
    *alignment_ = t18;
}

struct COEFFICIENTS(adabelief) {
    real l2, shrink, unscale, threshold, weight1, beta2, weight2, correct1, correct2, eps, lr;
};

static inline void ELEMENT(adabelief)(
    const struct COEFFICIENTS(adabelief) *restrict c, real *p_, real g,
    real *exp_avg_, real *exp_avg_var_, real *alignment_)
{
    const real p = *p_;
    const real exp_avg = *exp_avg_;
    const real exp_avg_var = *exp_avg_var_;
    const real t0 = g * c->unscale;
    const real t1 = SCALED(p, c->l2);
    const real t2 = t0 + t1;
    const real t3 = t2 - exp_avg;
    const real t4 = t3 * c->weight1;
    const real t5 = exp_avg + t4;
    const real t6 = t2 - t5;
    const real t7 = exp_avg_var * c->beta2;
    const real t8 = t6 * t6;
    const real t9 = t8 * c->weight2;
    const real t10 = t7 + t9;
    const real t11 = t10 + c->eps;
    const real t12 = t5 * c->correct1;
    const real t13 = t11 * c->correct2;
    const real t14 = SQRT(t13);
    const real t15 = t14 + c->eps;
    const real t16 = t12 / t15;
    const real t17 = SIGN(t2);
    const real t18 = t5 * t17;
    const real t19 = HOLD(t18, t16);
    const real t20 = p * c->shrink;
    const real t21 = t19 * c->lr;
    const real t22 = t20 - t21;
    *p_ = t22;
    *exp_avg_ = t5;
    *exp_avg_var_ = t11;
    *alignment_ = t18;
}

/* X(name, buffers, coefficients) */
#undef RULES
#define RULES(X) \
    X(adam, 2, 11) \
    X(adam_max_exp_avg_sq, 3, 11) \
    X(sgdm, 1, 7) \
    X(sgdm_ahead, 1, 8) \
    X(sgdm_without_momentum_buffer, 0, 7) \
    X(lion, 1, 7) \
    X(radam, 2, 11) \
    X(yogi, 2, 11) \
    X(adabelief, 2, 11)
