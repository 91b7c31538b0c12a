"""All that optax exports: usable on shards as it is, usable in a wrapper, or not usable."""

import functools
import warnings

import jax
import jax.numpy as jnp
import optax
from optax import contrib

RATE = 1e-2


def matrices(params):
    return jax.tree.map(lambda w: w.ndim > 1, params)


def large(params):
    return jax.tree.map(lambda w: w.size > 100, params)


def last_two(params):
    return jax.tree.map(lambda w: contrib.MuonDimensionNumbers(w.ndim - 2, w.ndim - 1), params)


def labels(params):
    return jax.tree.map(lambda w: "matrix" if w.ndim > 1 else "rest", params)


def every_other_step(count, **_):
    return count % 2 == 0


def by_its_old_name(make):
    """What optax still exports, and warns about."""
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        return make()


def downhill(transformation):
    return optax.chain(transformation, optax.scale(-RATE))


def of_leaves(update):
    """A transformation without state: `update(gradient, parameter)` of each leaf."""
    return downhill(optax.stateless(lambda updates, params: jax.tree.map(update, updates, params)))


# Transformations, which chains are made of
ELEMENTWISE = {
    "add_decayed_weights": optax.add_decayed_weights(0.1, mask=matrices),
    "apply_every": optax.apply_every(2),
    "clip": optax.clip(0.5),
    "ema": optax.ema(0.9),
    "identity": optax.identity(),
    "scale_by_acprop": contrib.scale_by_acprop(),
    "scale_by_adadelta": optax.scale_by_adadelta(),
    "scale_by_adam": optax.scale_by_adam(),
    "scale_by_adamax": optax.scale_by_adamax(),
    "scale_by_adan": optax.scale_by_adan(),
    "scale_by_ademamix": contrib.scale_by_ademamix(),
    "scale_by_adopt": contrib.scale_by_adopt(),
    "scale_by_amsgrad": optax.scale_by_amsgrad(),
    "scale_by_belief": optax.scale_by_belief(),
    "scale_by_lion": optax.scale_by_lion(),
    "scale_by_optimistic_gradient": optax.scale_by_optimistic_gradient(),
    "scale_by_radam": optax.scale_by_radam(),
    "scale_by_rms": optax.scale_by_rms(),
    "scale_by_rss": optax.scale_by_rss(),
    "scale_by_schedule": optax.scale_by_schedule(optax.cosine_decay_schedule(1.0, 9)),
    "scale_by_sign": optax.scale_by_sign(),
    "scale_by_simplified_ademamix": contrib.scale_by_simplified_ademamix(),
    "scale_by_stddev": optax.scale_by_stddev(),
    "scale_by_yogi": optax.scale_by_yogi(),
    "trace": optax.trace(0.9),
}
MIXING = {
    "adaptive_grad_clip": optax.adaptive_grad_clip(0.1),
    "add_noise": optax.add_noise(0.1, 0.5, key=0),
    "centralize": optax.centralize(),
    "clip_by_block_rms": optax.clip_by_block_rms(0.5),
    "clip_by_global_norm": optax.clip_by_global_norm(0.5),
    "normalize": contrib.normalize(),
    "normalize_by_update_norm": optax.normalize_by_update_norm(),
    "scale_by_distance_over_gradients": optax.scale_by_distance_over_gradients(reps_rel=1.0),
    "scale_by_factored_rms": optax.scale_by_factored_rms(min_dim_size_to_factor=4),
    "scale_by_galore": contrib.scale_by_galore(rank=2, update_proj_gap=2),
    "scale_by_lbfgs": optax.scale_by_lbfgs(memory_size=3),
    "scale_by_muon": optax.masked(
        contrib.scale_by_muon(weight_dimension_numbers=last_two), matrices
    ),
    "scale_by_novograd": optax.scale_by_novograd(),
    "scale_by_param_block_norm": optax.scale_by_param_block_norm(),
    "scale_by_param_block_rms": optax.scale_by_param_block_rms(),
    "scale_by_polyak": optax.scale_by_polyak(),
    "scale_by_sm3": optax.scale_by_sm3(),
    "scale_by_trust_ratio": optax.scale_by_trust_ratio(),
    "zero_nans": optax.zero_nans(),
}
# What a step can use as it is on shards, and what needs a wrapper there
BARE = {name: downhill(each) for name, each in ELEMENTWISE.items()} | {
    "acprop": contrib.acprop(RATE),
    "adabelief": optax.adabelief(RATE),
    "adadelta": optax.adadelta(1.0),
    "adagrad": optax.adagrad(RATE),
    "adam": optax.adam(RATE),
    "adamax": optax.adamax(RATE),
    "adamaxw": optax.adamaxw(RATE),
    "adamw": optax.adamw(optax.warmup_cosine_decay_schedule(0.0, RATE, 2, 9), mask=matrices),
    "adan": optax.adan(RATE),
    "ademamix": contrib.ademamix(RATE),
    "adopt": contrib.adopt(RATE),
    "amsgrad": optax.amsgrad(RATE),
    "chain": optax.chain(optax.clip(0.5), optax.adam(RATE)),
    "cocob": contrib.cocob(1.0, weight_decay=0.1),
    "conditionally_mask": optax.conditionally_mask(optax.adam(RATE), every_other_step),
    "conditionally_transform": optax.conditionally_transform(optax.adam(RATE), every_other_step),
    "freeze": optax.chain(
        optax.adam(RATE), optax.freeze({"blocks": False, "head": True, "scale": False})
    ),
    "inject_hyperparams": optax.inject_hyperparams(optax.adamw)(
        optax.linear_schedule(RATE, 0.0, 9), weight_decay=0.1
    ),
    "inject_stateful_hyperparams": by_its_old_name(
        lambda: optax.inject_stateful_hyperparams(optax.adamw)(optax.linear_schedule(RATE, 0.0, 9))
    ),
    "keep_params_nonnegative": optax.chain(optax.sgd(RATE), optax.keep_params_nonnegative()),
    "lion": optax.lion(RATE),
    "madgrad": contrib.madgrad(RATE),
    "masked": optax.chain(optax.masked(optax.trace(0.9), matrices), optax.sgd(RATE)),
    "MultiSteps": optax.MultiSteps(optax.adam(RATE), 2),
    "multi_transform": optax.multi_transform(
        {"matrix": optax.adam(RATE), "rest": optax.sgd(RATE)}, labels
    ),
    "nadam": optax.nadam(RATE),
    "nadamw": optax.nadamw(RATE),
    "named_chain": optax.named_chain(("clip", optax.clip(0.5)), ("adam", optax.adam(RATE))),
    "optimistic_adam": by_its_old_name(lambda: optax.optimistic_adam(RATE)),
    "optimistic_adam_v2": optax.optimistic_adam_v2(RATE),
    "optimistic_gradient_descent": optax.optimistic_gradient_descent(RATE),
    "partition": optax.partition({"matrix": optax.adam(RATE), "rest": optax.sgd(RATE)}, labels),
    "radam": optax.radam(RATE),
    "reduce_on_plateau": optax.chain(
        optax.adam(RATE), contrib.reduce_on_plateau(0.5, patience=1, rtol=0.5)
    ),
    "rmsprop": optax.rmsprop(RATE, centered=True, momentum=0.9),
    "rprop": optax.rprop(RATE),
    "scale": optax.scale(-RATE),
    "scale_by_cocob": contrib.scale_by_cocob(),
    "scale_by_learning_rate": optax.scale_by_learning_rate(RATE),
    "scale_by_madgrad": contrib.scale_by_madgrad(RATE),
    "scale_by_rprop": optax.scale_by_rprop(RATE),
    "schedule_free": contrib.schedule_free(optax.sgd(RATE), RATE),
    # Its warm-up is computed in float32, which two programs may round differently. Here every
    # number of it is exact.
    "schedule_free_adamw": contrib.schedule_free_adamw(2**-4, warmup_steps=4),
    "schedule_free_sgd": contrib.schedule_free_sgd(RATE),
    "selective_transform": optax.selective_transform(optax.adam(RATE), freeze_mask=matrices),
    "set_to_zero": optax.set_to_zero(),
    "sgd": optax.sgd(RATE, momentum=0.9, nesterov=True),
    "sign_sgd": optax.sign_sgd(RATE),
    "signum": optax.signum(RATE),
    "simplified_ademamix": contrib.simplified_ademamix(RATE),
    "split_real_and_imaginary": contrib.split_real_and_imaginary(optax.adam(RATE)),
    "stateless": optax.stateless(
        lambda updates, params: jax.tree.map(lambda g, w: -RATE * jnp.tanh(g + w), updates, params)
    ),
    "stateless_with_tree_map": optax.stateless_with_tree_map(lambda g, w: -RATE * jnp.tanh(g + w)),
    "with_extra_args_support": optax.with_extra_args_support(optax.adam(RATE)),
    "yogi": optax.yogi(RATE),
}
WRAPPED = {name: downhill(each) for name, each in MIXING.items()} | {
    "adafactor": optax.adafactor(RATE, min_dim_size_to_factor=4),
    "apply_if_finite": optax.apply_if_finite(optax.adam(RATE), 3),
    "dadapt_adamw": contrib.dadapt_adamw(),
    "dog": contrib.dog(),
    "dowg": contrib.dowg(),
    "flatten": by_its_old_name(lambda: optax.flatten(optax.adam(RATE))),
    "fromage": optax.fromage(RATE),
    "galore": contrib.galore(RATE, rank=2, update_proj_gap=2),
    "lamb": optax.lamb(RATE),
    "lars": optax.lars(RATE),
    "lbfgs": optax.lbfgs(RATE, memory_size=3, linesearch=None),
    "mechanize": contrib.mechanize(optax.adam(RATE)),
    "momo": contrib.momo(),
    "momo_adam": contrib.momo_adam(),
    "muon": contrib.muon(RATE),
    "noisy_sgd": optax.noisy_sgd(RATE, key=0),
    "novograd": optax.novograd(RATE),
    "polyak_sgd": optax.polyak_sgd(1.0),
    "prodigy": contrib.prodigy(),
    "sam": contrib.sam(optax.sgd(RATE), optax.chain(contrib.normalize(), optax.sgd(RATE))),
    "skip_large_updates": optax.MultiSteps(
        optax.adam(RATE),
        2,
        should_skip_update_fn=functools.partial(optax.skip_large_updates, max_squared_norm=300.0),
    ),
    "skip_not_finite": optax.MultiSteps(
        optax.adam(RATE), 2, should_skip_update_fn=optax.skip_not_finite
    ),
    "sm3": optax.sm3(RATE),
    "snapshot": optax.chain(optax.adam(RATE), optax.snapshot("norm", optax.tree.norm)),
}
UNUSABLE = {
    "differentially_private_aggregate": "needs the gradient of each example",
    "dpsgd": "needs the gradient of each example",
    "hutchinson_estimator_diag_hessian": "needs the loss as a function, in `init` and `update`",
    "lookahead": "needs parameters that are optax.LookaheadParams",
    "measure_with_ema": "returns a measurement, not an update",
    "monitor": "its state has another form after the first update",
    "scale_by_backtracking_linesearch": "needs the loss as a function",
    "scale_by_zoom_linesearch": "needs the loss as a function",
    "sophia": "needs the loss as a function",
}
TABLE = BARE | WRAPPED
