"""Mutants chosen by hand: faults that a careful reader might let pass, each of which gives wrong
behaviour without a word."""

from mutant import Mutant

WRAPPED = "test_wrapping.py"
BITS = "test_collectives.py::test_replicas_have_the_same_bits_of_what_was_just_computed"

COLLECTIVES = (
    Mutant(
        "pin_bits",
        "lax.platform_dependent(x, cpu=cpu.pin_bits_by_loop, default=lax.optimization_barrier)",
        "x",
        BITS,
        bits=True,
    ),
    Mutant(
        "all_gather_array",
        "pin_bits(x)",
        "x",
        "test_route.py::test_message_and_local_copy_are_one_instruction",
        bits=True,
    ),
    Mutant(
        "pin_buffer",
        "lax.platform_dependent(x, cpu=cpu.pin_buffer_by_loop, default=lax.optimization_barrier)",
        "x",
        "test_route.py::test_message_and_local_copy_are_one_instruction",
        bits=True,
    ),
    Mutant("Algorithm.all_mean", "x / n", "x * (1 / n)", "test_ring.py::test_meaning -k all_mean"),
    Mutant("_total", "x = pin_bits(x)", "x = x", f"{BITS} -k doubling", bits=True),
    Mutant(
        "_check",
        "if arrival in sent:",
        "if False:",
        "test_route.py::test_wrong_tables_are_refused_and_right_ones_are_not",
    ),
    Mutant(
        "_check",
        "sent[o] = r",
        "sent.setdefault(o, -1)",
        "test_route.py::test_refusals_name_round_and_block",
    ),
    Mutant(
        "_check",
        "if len(sent) < route.n - 1:",
        "if len(sent) < route.n - 2:",
        "test_route.py::test_wrong_tables_are_refused_and_right_ones_are_not",
    ),
    Mutant(
        "_arrivals",
        "(after, offsets) if backwards",
        "(offsets, after) if backwards",
        "test_ring.py::test_meaning",
    ),
    Mutant(
        "pieces_of",
        "nbytes <= JOINED",
        "nbytes < JOINED",
        "test_cost.py::test_large_blocks_are_sent_apart",
    ),
    Mutant(
        "_joined",
        "else blocks",
        "else blocks[::-1]",
        "test_route.py::test_right_tables_run_to_the_sum",
    ),
    Mutant(
        "total",
        "sum(message.pieces for message in messages)",
        "1",
        "test_cost.py::test_large_blocks_are_sent_apart",
    ),
    Mutant(
        "_hands_on",
        "step == next_step and ",
        "",
        "test_route.py::test_a_chain_that_changes_its_step_is_no_loop",
    ),
    Mutant(
        "_scatter_in_a_loop",
        "trip + 1)",
        "trip)",
        "test_route.py::test_chains_are_loops_wherever_they_begin",
    ),
    Mutant(
        "_scatter_in_a_loop",
        "if not any(offset in sums[table] for arriving in offsets_by_trip for offset in arriving):",
        "if True:",
        "test_route.py::test_chains_are_loops_wherever_they_begin",
    ),
    Mutant(
        "_gather_in_a_loop",
        "sent_on_later = chain.start > 0",
        "sent_on_later = False",
        "test_route.py::test_chains_are_loops_wherever_they_begin",
    ),
    Mutant(
        "shares_of",
        "part < length % parts",
        "part <= length % parts",
        "test_collectives.py::test_meaning_type_and_gradient -k two_rings",
    ),
    Mutant(
        "_in_order",
        "reversed(groups)",
        "groups",
        "test_axis.py::test_one_after_the_other_is_the_group",
    ),
    Mutant("combined_axis", "> 1", "> 9", "test_axis.py::test_joined"),
    Mutant(
        "Axis.of",
        "len(names) == len(axis)",
        "names",
        "test_axis.py::test_one_after_the_other_is_the_group",
    ),
    Mutant("Algorithm.all_mean", "x / n", "x", "test_ring.py::test_meaning"),
    Mutant(
        "_exchange",
        "route.offset_after(route.home, offset)",
        "offset",
        "test_ring.py::test_meaning -k all_to_all",
    ),
    Mutant(
        "halving",
        "-(-remaining // by)",
        "remaining // by",
        "test_route.py::test_tables_are_right -k halving",
    ),
    Mutant(
        "two_rings",
        "Route((n,), [{-1: [h]} for h in range(1, n)])",
        "ring.table(n)",
        "test_collectives.py::test_two_rings_go_in_opposite_directions",
    ),
    Mutant("hierarchical", "[::-1]", "", "test_collectives.py::test_the_slow_axis_carries_a_part"),
    Mutant("torus", "{}] * (longest - n)", "{}] * 0", "test_cost.py::test_rounds_name_steps"),
    Mutant(
        "_in_mesh_order",
        "np.argsort(in_mesh_order).tolist()",
        "in_mesh_order.tolist()",
        "test_ring.py::test_meaning",
    ),
    Mutant(
        "_selected",
        "jnp.where(holds, leaf, alternative(leaf))",
        "leaf",
        "test_replicated.py::test_ordered_keeps_a_collective_behind_a_loop",
    ),
    Mutant(
        "_batched",
        "out_axes=dim",
        "out_axes=0",
        "test_replicated.py::test_linear_is_the_function_it_wraps",
    ),
    Mutant(
        "quantize", "[1] - 7", "[1] - 6", "test_quantized.py::test_a_message_is_near_its_numbers"
    ),
    Mutant(
        "_gather",
        "    return values(ring.all_gather(sent, axis_name)),",
        "    gathered = values(ring.all_gather(sent, axis_name))\n    return jnp.where("
        "_is_local(gathered, axis_name), part, gathered),",
        "test_quantized.py::test_bound",
        bits=True,
    ),
    Mutant(
        "_all_reduce",
        "jnp.where(_is_local(error, axis_name), gather_error[None], error)",
        "error",
        "test_quantized.py::test_with_error_feedback_nothing_is_lost",
    ),
    Mutant(
        "assign_buckets",
        "filled + size > nbytes",
        "filled + size >= nbytes",
        "test_buckets.py::test_every_leaf_is_in_one_bucket_that_is_full_but_not_too_full",
    ),
    Mutant(
        "bucketed",
        "sequence_after(parts, done)",
        "parts",
        "test_buckets.py::test_one_bucket_is_packed_at_a_time",
    ),
    Mutant(
        "_from_both_sides",
        "2 * h < n",
        "2 * h <= n",
        "test_matmul.py::test_equals_the_collective_and_the_product",
    ),
    Mutant(
        "_all_gather_matmul_backward",
        "accumulation_dtype(weight.dtype)",
        "weight.dtype",
        "test_matmul.py::test_sums_of_a_weights_gradient_are_wide",
    ),
    Mutant("_hops", "1 + max(", "max(", "test_cost.py::test_rounds_name_steps"),
    Mutant(
        "messages",
        "longest[number + 1] > longest[number]",
        "True",
        "test_cost.py::test_rounds_name_steps",
    ),
    Mutant(
        "fit",
        "cost.of(f, 4 * count, n)",
        "cost.of(f, count, n, itemsize=1)",
        "test_tuning.py::test_a_fit_prices_the_bytes_that_its_calls_send",
    ),
)

LAYERS = (
    Mutant(
        "_compares_counts",
        "len(joined) > 1",
        "len(joined) > 0",
        "test_context.py::test_tiles_that_are_filled_up_compare_no_counts",
    ),
    Mutant(
        "check_places",
        "if uses_positions:",
        "if True:",
        "test_context.py::test_a_mask_by_its_own_count_is_refused",
    ),
    Mutant(
        "_has_constant_mask",
        "numbers != numbers[..., :1, :]",
        "numbers == numbers",
        "test_context.py::test_attention_that_needs_no_count_is_not_refused",
    ),
    Mutant(
        "_has_constant_mask",
        "any(_has_constant_mask(body, scores) for body in bodies)",
        "False",
        "test_context.py::test_a_mask_by_its_own_count_is_refused",
    ),
    Mutant(
        "_of_array",
        "not np.array_equal(first, block)",
        "False",
        "test_bisect.py::test_copies_of_whole_numbers_that_differ_are_reported",
    ),
    Mutant(
        "_described",
        "np.iscomplexobj(right) or np.iscomplexobj(wrong)",
        "False",
        "test_bisect.py::test_imaginary_parts_are_compared",
    ),
    Mutant(
        "_Operation._check_same_on_each_device",
        "dim.split - value.differs",
        "dim.split",
        "test_lint_spread.py::test_the_right_layer_is_silent",
    ),
    Mutant(
        "_Operation._term",
        "value.differs | value.shared",
        "value.differs",
        "test_lint_spread.py::test_the_right_layer_is_silent",
    ),
    Mutant(
        "_Operation._together",
        "part != by_source",
        "False and by_source",
        "test_lint_spread.py::test_the_mistake_is_found_on_its_line",
    ),
    Mutant(
        "_group",
        " if size > 1 or dim.split]",
        "]",
        "test_lint_spread.py::test_the_mistake_is_found_on_its_line -k size_1",
    ),
    Mutant(
        "Reading.flat",
        "node.scope._replace(predicates=())",
        "Scope()",
        "test_lint_spread.py::test_terms_that_are_merged_are_no_mistake",
    ),
    Mutant(
        "Reading._operation",
        '"transpose("',
        '"?"',
        "test_lint_spread.py::test_terms_that_are_merged_are_no_mistake",
    ),
    Mutant(
        "_differently_ordered",
        " and not _are_successive(placed, placed_targets, dim)",
        "",
        "test_lint_tokens.py::test_no_alarm_where_the_values_do_not_tell",
    ),
    Mutant(
        "_shard_maps",
        "known |= dict(zip(jaxpr.invars, arguments, strict=True))",
        "known |= dict.fromkeys(jaxpr.invars)",
        "test_lint_tokens.py::test_tokens_over_two_axes_are_found",
    ),
    Mutant(
        "is_jax_function",
        "_LIBRARIES[0]",
        "_LIBRARIES",
        "test_lint_tokens.py::test_a_line_under_filter_jit_is_the_callers",
    ),
    Mutant(
        "_lines_that_cut",
        "after[-2:] == parts",
        "len(after) > 1",
        "test_lint_spread.py::test_attention_with_the_heads_of_a_device_is_silent",
    ),
    Mutant(
        "_splits",
        "spec[aval.ndim - 2]",
        "spec[0]",
        "test_lint_spread.py::test_attention_that_makes_all_heads_of_a_shard_is_found",
    ),
    Mutant(
        "ShardMap.note_clipped_sums",
        "if axes and not",
        "if axes or not",
        "test_lint_clipping.py -k islands",
    ),
    Mutant(
        "ShardMap._note_scaled",
        ") > 1",
        ") > 0",
        "test_lint_clipping.py -k 'no_mistake or example'",
    ),
    Mutant(
        "ShardMap._note_scaled",
        'reduced.node.is_within("jvp(")',
        'reduced.node.is_within("?")',
        "test_lint_clipping.py::test_no_mistake",
    ),
    Mutant(
        "ShardMap._note_scaled",
        "loop.outputs.index(value)",
        "0",
        "test_lint_clipping.py -k one_leaf",
    ),
    Mutant("ShardMap._rows", "if dim.rows", "", "test_lint_clipping.py::test_no_mistake"),
    Mutant(
        "scalings",
        "len(scaled) == 1 and scaled[0] in values",
        "scaled",
        "test_lint_clipping.py -k commutes",
    ),
    Mutant(
        "origins",
        '"concatenate", "slice", "split"',
        '"slice", "split"',
        "test_lint_clipping.py -k before_the_sum",
    ),
    Mutant(
        "_held",
        "(row >= 0) & (row < rows)",
        "(row >= 0) & (row <= rows)",
        "test_tensor.py::test_embed_equals_take",
    ),
    Mutant(
        "check_row",
        "if same := sorted(of_x - of_weight):",
        "if same := ():",
        "test_tensor_layers.py::test_the_wrong_order_is_refused",
    ),
    Mutant(
        "check_row",
        "if same := sorted(of_weight - of_x):",
        "if same := ():",
        "test_tensor_layers.py::test_the_wrong_order_is_refused",
    ),
    Mutant(
        "check_row",
        "lax.axis_size(axis_name) > 1",
        "True",
        "test_tensor_layers.py::test_a_row_of_one_device_may_be_whole",
    ),
    Mutant(
        "_check_linear",
        "if shape != whole:",
        "if False:",
        "test_tensor_layers.py::test_the_wrong_order_is_refused",
    ),
    Mutant(
        "cross_entropy",
        "columns + axis.index() * columns_here < vocabulary",
        "columns + axis.index() * columns_here <= vocabulary",
        "test_tensor.py::test_cross_entropy_equals_log_softmax",
    ),
    Mutant(
        "gather_from",
        ", name=remat.GATHERED",
        "",
        "test_zero.py::test_tensor_and_sequence_parallelism_move_the_same -k gathers",
        long=True,
    ),
    Mutant(
        "mean",
        "mean_loss = jnp.mean(losses.reshape(-1)[:count])",
        "mean_loss = jnp.mean(losses)",
        "test_cross_entropy.py::test_equals_the_plain_loss",
    ),
    Mutant(
        "mean",
        "zeros = match_varying(jnp.zeros(table.shape, wide), table)",
        "zeros = match_varying(jnp.zeros(table.shape, table.dtype), table)",
        "test_cross_entropy.py::test_narrow_inputs_have_wide_sums",
    ),
    Mutant(
        "accumulated",
        "total / microbatches",
        "total",
        "test_grads.py::test_accumulated_equals_the_whole_batch",
    ),
    Mutant(
        "accumulated",
        "dtype=accumulation_dtype(gradient.dtype)",
        "dtype=gradient.dtype",
        "test_grads.py::test_sums_are_kept_wide",
    ),
    Mutant("norm", "jnp.conj(x)", "x", "test_grads.py"),
    Mutant(
        "averaged",
        "total / axis.size()",
        "total",
        "test_tuples.py::test_experts_over_data_and_expert",
    ),
    Mutant(
        "value_and_sums",
        " if name in differs)",
        ")",
        "test_reduced_in_backward.py::test_gradients_are_those_of_one_device",
    ),
    Mutant(
        "value_and_sums",
        "{*varying_axes(gradient), *varying_axes(declared)}",
        "set()",
        "test_grads.py",
    ),
    Mutant("axes_of_copies", " or name in declared)", ")", f"{WRAPPED} -k inner_mean_under_jit"),
    Mutant(
        "local_gradients",
        " if name not in enclosing.declared}",
        "}",
        f"{WRAPPED} -k inner_mean_under_jit",
    ),
    Mutant("_reduced_axes", "name in differs and", "True and", f"{WRAPPED} -k reduced_together"),
    Mutant(
        "_Program.check",
        "may_be_reduced and any(reaches)",
        "may_be_reduced",
        f"{WRAPPED} -k constant",
    ),
    Mutant(
        "check_typed",
        "name not in axes_of_type(index_type)",
        "False",
        f"{WRAPPED} -k does_not_tell",
    ),
    Mutant(
        "norm", "ENCLOSING.value.declared & set(names)", "set()", f"{WRAPPED} -k that_clips_inside"
    ),
    Mutant(
        "refuse_clipped",
        "isinstance(inspect.unwrap(grad), Clipped)",
        "False",
        f"{WRAPPED} -k that_clips_inside",
    ),
    Mutant(
        "check_equal_rows",
        "len(set(rows.values())) > 1",
        "False",
        f"{WRAPPED} -k other_numbers_of_rows",
    ),
    Mutant("_uneven_axes", "and len(rows) > 1", "and False", f"{WRAPPED} -k one_spec_for_rows"),
    Mutant("_uneven_axes", "and len(rows) > 1", "", f"{WRAPPED} -k unequal_rows_that_are_meant"),
    Mutant(
        "_check_one_spec",
        "not jnp.issubdtype(leaf.dtype, jax.dtypes.extended)",
        "True",
        f"{WRAPPED} -k unequal_rows_that_are_meant",
    ),
    Mutant(
        "_program_with_shares",
        'if not re.search("shape|dimension|rank|size", str(error)):',
        "if False:",
        f"{WRAPPED} -k other_arguments",
    ),
    Mutant(
        "_is_causal",
        "is_constant(table[side]) and is_constant(table[~side])",
        "True",
        "test_context.py -k a_kernel_of_distances",
    ),
    Mutant(
        "check_kernel",
        "min(chunks * devices, MOST_TOKENS // chunk)",
        "1",
        "test_context.py -k a_kernel_of_distances",
    ),
    Mutant(
        "_fixed_heads",
        'hasattr(weight, "ndim")',
        "True",
        "test_lint_rules.py -k frozen_modules",
    ),
    Mutant(
        "rules",
        "axis not in batch_axes and ",
        "",
        "test_lint_rules.py -k 'fixed_number_of_heads or stacked_gates'",
    ),
    Mutant(
        "_Program.check", "is_used and trees", "False and trees", f"{WRAPPED} -k one_use_of_two"
    ),
    Mutant(
        "_Ways.plain",
        "self.passed_on |= joined.alone",
        "pass",
        f"{WRAPPED} -k 'gather_counts and hand'",
    ),
    Mutant(
        "_Ways.plain",
        "any(aval.shape for aval in types(eqn.invars))",
        "True",
        f"{WRAPPED} -k travel",
    ),
    Mutant(
        "_Ways.plain",
        "joined = Reach(joined.at_all, sent=joined.at_all, multiplied=joined.multiplied)",
        "pass",
        f"{WRAPPED} -k 'gather_counts and lax'",
    ),
    Mutant(
        "_Ways.plain",
        "activations.at_all & self.own_data & ~activations.sent",
        "activations.at_all & self.own_data & ~activations.at_all",
        f"{WRAPPED} -k own_rows_is_sent",
    ),
    Mutant("uses", "ways.own_data & ways.passed_on", "False", f"{WRAPPED} -k meet_a_share"),
    Mutant("_Sums.plain", "|= not is_gather and", "|= False and", f"{WRAPPED} -k 'a_head_sums'"),
    Mutant("_Sums._of_gathered", "|= dim in axes", "|= False", f"{WRAPPED} -k 'a_head_sums'"),
    Mutant(
        "_Sums._of_gathered", "dim in contracted[place]", "False", f"{WRAPPED} -k 'a_head_sums'"
    ),
    Mutant(
        "_Sums._of_gathered", "is_kept and not is_chosen", "is_kept", f"{WRAPPED} -k 'a_head_sums'"
    ),
    Mutant(
        "_Sums.plain", "any(map(self._is_zero, operands))", "True", f"{WRAPPED} -k 'a_head_sums'"
    ),
    Mutant(
        "_Sums.plain", "any(map(self._is_zero, operands))", "False", f"{WRAPPED} -k 'a_head_sums'"
    ),
    Mutant(
        "_Sums.__init__",
        "types.axis_size(axis) - 1",
        "types.size(axis)",
        f"{WRAPPED} -k 'a_head_sums'",
    ),
    Mutant(
        "_Sums._chosen", "cases[case] for case in taken", "cases[0]", f"{WRAPPED} -k 'a_head_sums'"
    ),
    Mutant("_Sums.loop", "unnumbered(sliced)", "sliced", f"{WRAPPED} -k 'a_head_sums'"),
    Mutant(
        "_program_with_shares", "except TypeError", "except KeyError", f"{WRAPPED} -k does_not_fit"
    ),
    Mutant(
        "Following.results",
        'name in COLLECTIVES or name == "optimization_barrier"',
        "False",
        f"{WRAPPED} -k beside_gradients",
    ),
    Mutant(
        "_Ways.plain",
        "joined if differs else",
        "joined if True else",
        f"{WRAPPED} -k beside_gradients",
    ),
    Mutant("_check_own", "if local:", "if False:", f"{WRAPPED} -k forgotten"),
    Mutant(
        "_Update.explain",
        "not leaf.is_shard",
        "False",
        f"{WRAPPED} -k forgotten",
    ),
    Mutant(
        "_Update.explain",
        "np.shape(x) != np.shape(leaf.gradient) and",
        "False and",
        f"{WRAPPED} -k forgotten",
    ),
    Mutant("ZeRO", "if shape != needed:", "if False:", "test_zero_said_once.py -k forgotten"),
    Mutant("ZeRO", "if path not in wholes:", "if False:", "test_zero_said_once.py -k forgotten"),
    Mutant(
        "ZeRO",
        "if self.stage == 2 else grad",
        "if self.stage == 4 else grad",
        "test_zero_said_once.py -k scatters",
    ),
    Mutant(
        "ZeRO",
        "if self.stage == 3 else self.inside",
        "if self.stage == 2 else self.inside",
        "test_zero_said_once.py",
    ),
    Mutant(
        "Embedding.__call__",
        "if len(weight) * devices != rows:",
        "if False:",
        "test_tensor_layers.py::test_an_embedding_that_is_not_split_is_refused",
    ),
    Mutant(
        "reduced_in_backward",
        "cotangent.astype(accumulation_dtype(cotangent.dtype))",
        "cotangent",
        "test_reduced_in_backward.py::test_sums_are_wide",
    ),
    Mutant(
        "grad_of",
        ", reduced=already_summed)",
        ")",
        "test_reduced_in_backward.py::test_the_recipe_sums_in_the_loop",
    ),
    Mutant("_check", " or layout.zero)", ")", "test_reduced_in_backward.py::test_refusals"),
    Mutant(
        "_check", " or layout.microbatches > 1", "", "test_reduced_in_backward.py::test_refusals"
    ),
    Mutant("_check", "not layout.sequence", "False", "test_reduced_in_backward.py::test_refusals"),
    Mutant(
        "overlapping",
        "matmul_reduce_scatter=matmul.matmul_reduce_scatter",
        "matmul_reduce_scatter=None",
        "test_reduced_in_backward.py::test_products_while_tokens_travel_gather_nothing",
    ),
    Mutant(
        "replicated_axes",
        "if name not in varying_axes(x)",
        "if True",
        "test_step.py::test_evaluation_is_the_loss_without_dropout",
    ),
    Mutant(
        "summed_over",
        "if names_of_leaf == group",
        "if set(names_of_leaf) <= set(group)",
        "test_tuples.py::test_hybrid_shares",
    ),
    Mutant("splits_of", "names[-len(inside) :] != inside", "False", "test_tuples.py -k outer"),
    Mutant(
        "part_specs",
        "if split:",
        "if False:",
        "test_tuples.py::test_layers_that_are_shared_out_are_refused_where_they_are_looped_over",
    ),
    Mutant(
        "_check_reduced",
        "axes_of_several_devices(of_weight - of_gradient)",
        "axes_of_several_devices(of_weight - of_weight)",
        "test_tuples.py::test_a_gradient_that_mixes_shards_is_refused",
    ),
    Mutant(
        "normalized",
        "weights.size * axis.size()",
        "weights.size",
        "test_cross_entropy.py::test_a_weighted_mean_is_that_of_the_whole_batch",
    ),
    Mutant(
        "cross_entropy",
        "_outside(targets, vocabulary)",
        "_outside(targets, vocabulary + 1)",
        "test_cross_entropy.py::test_a_target_outside_the_vocabulary_has_no_loss",
    ),
    Mutant(
        "stacked_axes",
        "len(set(dims)) == 1",
        "False",
        "test_rules.py::test_layers_that_do_not_divide_are_never_advised_to_be_whole",
    ),
    Mutant(
        "reduce_scattered",
        "return total / axis.size()",
        "return total",
        "test_zero.py::test_five_steps_are_those_of_one_device",
    ),
    Mutant(
        "_mean_share",
        "return total /",
        "return total *",
        "test_zero.py::test_a_sharded_optimizer_is_the_optimizer",
    ),
    Mutant(
        "reduce_scatter",
        "reduce_scatter(x.astype(types.accumulation_dtype(x.dtype)),",
        "reduce_scatter(x,",
        "test_zero.py::test_sums_over_replicas_are_wide",
    ),
    Mutant(
        "adjusted",
        "jnp.where(rises, 0, good)",
        "good",
        "test_precision.py::test_the_scale_falls_at_an_overflow_and_rises_after_an_interval",
    ),
    Mutant(
        "gathers",
        'params["name"] == GATHERED',
        'params["name"] != GATHERED',
        "test_zero.py::test_tensor_and_sequence_parallelism_move_the_same -k gathers",
        long=True,
    ),
)

IN_TWO = "test_weight_lane.py::"
TOKENS = "test_schedule.py::test_tables_are_refused_where_a_token_would_not_arrive_and_nowhere_else"
IN_TURNS, PLANNED, PLAYED = (
    "test_branching.py::",
    "test_plan.py::",
    "test_slots_hold_each_array_from_its_job_to_its_use",
)
LEAKS = "test_pipeline.py::test_garbage_never_leaks[table4-False]"

PIPELINE = (
    Mutant(
        "slots_for",
        "if not set(axes(axis.names)) & set(along):",
        "if False:",
        "test_pipeline_trees.py -k computed_in_a_checkpoint",
    ),
    Mutant(
        "Jobs.backward",
        'row.saved["backward"][self.index]',
        'row.saved["forward"][self.index]',
        "test_pipeline_trees.py -k computed_in_a_checkpoint",
    ),
    Mutant(
        "Jobs.forward",
        "chosen(task.position == 0",
        "chosen(self.first",
        "test_pipeline.py::test_garbage_never_leaks",
    ),
    Mutant(
        "Programs.task",
        "[chunk, self.index]",
        "[0 * chunk, self.index]",
        "test_pipeline.py::test_garbage_never_leaks",
    ),
    Mutant(
        "Programs.task",
        "jnp.asarray(self.schedule.placed)[chunk, self.index]",
        "chunk + self.index",
        "test_pipeline.py::test_garbage_never_leaks",
    ),
    Mutant(
        "masked",
        "jnp.where(counts, x, jnp.zeros((), x.dtype))",
        "x * counts.astype(x.dtype)",
        "test_pipeline.py::test_garbage_never_leaks",
    ),
    Mutant(
        "coloured",
        "written if lane == first else",
        "np.maximum(jobs, 0) if lane == first else",
        "test_pipeline.py::test_a_pipeline_computes_what_one_device_does",
    ),
    Mutant(
        "Jobs._with_gradients",
        "self._with_ends(carry, gradients.ends, task.valid)",
        "carry",
        "test_pipeline_trees.py::test_everything_at_once_is_as_on_one_device",
    ),
    Mutant(
        "Programs._trace_jobs",
        "jnp.ones_like(out[1])",
        "jnp.zeros_like(out[1])",
        "test_pipeline_refusals.py::test_a_penalty_on_the_blocks_is_a_term_of_the_stage",
    ),
    Mutant(
        "_cut_dim",
        "x.shape[dim] % t == 0",
        "False",
        "test_pipeline_trees.py::test_a_split_exchange_sends_its_part",
    ),
    Mutant(
        "_source",
        "for operand in operands(tracer) if id(operand) not in seen",
        "for operand in () if id(operand) not in seen",
        "test_pipeline_refusals.py::test_a_gradient_that_would_be_missing",
    ),
    *(
        Mutant("_check", rule, broken, TOKENS)
        for rule, broken in (
            ("else waits != 1", "else waits < 1"),
            ("waits < 1 if per_stage", "waits < 0 if per_stage"),
            ("if idle.size and not per_stage", "if False"),
            ("if not per_stage and not is_looped", "if per_stage and not np.array_equal"),
        )
    ),
    Mutant(
        "Schedule.in_flight",
        "np.cumsum(reads_last, axis=0) - reads_last",
        "np.cumsum(reads_last, axis=0)",
        "test_schedule.py::test_in_flight_is_the_formula",
    ),
    Mutant("start_times", "hop * (homes[cause.place] != stage)", "hop", "test_schedule.py"),
    Mutant(
        "Jobs.weight",
        'row.saved["weight"]',
        'row.saved["backward"]',
        LEAKS,
    ),
    Mutant("Jobs.weight", 'row.deferred["weight"]', 'row.deferred["backward"]', LEAKS),
    Mutant(
        "_is_cheap",
        " and all(name in CHEAP for name in primitives(eqn))",
        "",
        IN_TWO + "test_two_parts_are_the_whole",
    ),
    Mutant(
        "_may_run_in",
        "size(set(eqn.outvars)) <= size(reads & made)",
        "False",
        IN_TWO + "test_what_waits_is_no_larger_than_the_cotangents_of_products",
    ),
    Mutant(
        "_reach", "if with_carries == results:", "if True:", IN_TWO + "test_two_parts_are_the_whole"
    ),
    Mutant(
        "zero_bubble_lockstep",
        "(tick + np.arange(P), job)",
        "(tick, job)",
        "test_schedule.py::test_the_bubble_is_the_formula",
    ),
    Mutant("gpipe", "(M - 1 - m)", "m", "test_schedule.py::test_gpipe_goes_back_the_way_it_came"),
    Mutant(
        "fewest", "busy[0][0] <= ", "busy[0][0] < ", IN_TURNS + "test_as_many_in_flight_as_stages"
    ),
    Mutant(
        "greedy",
        ">= max_chunks[s]",
        "> max_chunks[s]",
        IN_TURNS + "test_as_many_in_flight_as_stages",
    ),
    Mutant(
        "rows",
        "arrival[lane][message.used, message.target]",
        "arrival[lane][message.sent, message.target]",
        IN_TURNS + PLAYED,
    ),
    Mutant("rows", "(message.target - message.source) % P", "1 % P", IN_TURNS + PLAYED),
    Mutant("needs", 'Job("backward", m, place + 1) if place < last else ', "", IN_TURNS + PLAYED),
    Mutant(
        "head",
        "jobs.schedule.stages - 1 - jobs.schedule.last",
        "0",
        IN_TURNS + "test_chunks_may_be_in_the_shape_of_a_v",
    ),
    Mutant(
        "_stacked_aux",
        "by_chunk[:, np.argsort(schedule.placed, axis=None)]",
        "by_chunk",
        IN_TURNS + "test_auxiliary_values_are_in_order",
    ),
    Mutant(
        "refuse_crossing",
        "if crosses:",
        "if False:",
        IN_TURNS + "test_what_all_devices_must_run_at_once_is_refused",
    ),
    Mutant(
        "refuse_crossing",
        "if eqn.primitive.name not in GROUPED:",
        "if False:",
        IN_TURNS + "test_what_all_devices_must_run_at_once_is_refused",
    ),
    Mutant(
        "run",
        "schedule.arrival_count + 1)",
        "schedule.arrival_count)",
        IN_TURNS + "test_garbage_never_leaks",
    ),
    Mutant(
        "_sent",
        "masked(microbatch >= 0, carry.arrived.sent)",
        "carry.arrived.sent",
        IN_TURNS + "test_what_all_stages_run_runs_in_its_ticks_alone",
    ),
    Mutant(
        "_if_runs",
        "(column >= 0).sum()",
        "(column >= 1).sum()",
        IN_TURNS + "test_the_program_is_the_table",
    ),
    Mutant(
        "followers", "if place > 0:", "if place > 1:", IN_TURNS + "test_as_many_in_flight_as_stages"
    ),
    Mutant(
        "Schedule.timed_ticks",
        ".argmax(axis=1)",
        ".argmin(axis=1)",
        PLANNED + "test_the_time_of_turns_is_a_fold_over_the_table",
    ),
    Mutant(
        "waited",
        "backward=backward",
        "backward=size.backward",
        PLANNED + "test_turns_hold_fewer_microbatches_and_wait_for_the_dearest_job",
    ),
    Mutant(
        "counts",
        "not jobs(layout).deferred or ",
        "True or ",
        PLANNED + "test_turns_hold_fewer_microbatches_and_wait_for_the_dearest_job",
    ),
    Mutant(
        "_from_0",
        "job.microbatch - (",
        "job.microbatch - 0 * (",
        "test_foreign_schedules.py::test_torchs_1f1b_is_ours",
    ),
    Mutant(
        "_products",
        "trips * sum(",
        "sum(",
        IN_TWO + "test_the_work_of_a_stage_is_counted_in_its_jaxpr",
    ),
)

PLACEMENT = (
    Mutant(
        "fsdp.split",
        "max(fit, key=lambda dim: leaf.shape[dim])",
        "min(fit, key=lambda dim: leaf.shape[dim])",
        "test_rules.py::test_fsdp_splits_the_largest_free_dim",
    ),
    Mutant(
        "_moment_spec",
        "choices[0] if len(set(choices)) == 1 else None",
        "choices[0]",
        "test_rules.py::test_factored_moments_keep_the_splits_of_their_dims",
    ),
    Mutant(
        "_kernel",
        "causal=True",
        "causal=False",
        "test_flash.py::test_the_kernel_is_the_plain_attention",
    ),
    Mutant(
        "attention",
        "if T % block == 0",
        "if True",
        "test_flash.py::test_what_the_kernel_cannot_is_computed_plainly",
    ),
    Mutant(
        "Jobs._with_gradients",
        "masked(task.valid, d[0])",
        "d[0] * task.valid",
        "test_pipeline.py::test_garbage_never_leaks",
    ),
    Mutant(
        "coordinates",
        "if total.min() < cost:",
        "if best is None:",
        "test_torus.py -k wherever_they_can_be",
    ),
    Mutant("_lines", "fold and digit % 2 == 1", "False", "test_torus.py -k wherever_they_can_be"),
    Mutant(
        "closed_dims",
        "all(size % 4 == 0 for size in sizes)",
        "False",
        "test_torus.py::test_what_closes_in_the_replay",
    ),
    Mutant(
        "spmd",
        "check_vma=True)(*arrays)",
        "check_vma=False)(*arrays)",
        "test_mesh.py::test_jax_refuses_copies_that_may_differ",
    ),
    Mutant(
        "free",
        "not entry_axes(entries[dim]) and length % size == 0",
        "length % size == 0",
        "test_rules.py",
    ),
    Mutant(
        "make",
        "jnp.isfinite(norm) & jnp.isfinite(loss)",
        "jnp.isfinite(norm)",
        "test_training.py::test_a_loss_that_is_not_finite_skips_its_step",
    ),
    Mutant(
        "sequence_keys",
        "jax.random.fold_in(key, step)",
        "key",
        "test_step.py::test_every_sequence_and_step_has_a_key_of_its_own",
    ),
    Mutant(
        "loss_of",
        ".all_mean(loss",
        ".all_reduce(loss",
        "test_step.py::test_evaluation_is_the_loss_without_dropout",
    ),
    Mutant(
        "_on_blocks",
        "change(family.where(leaf))",
        "family.where(leaf)",
        "test_families.py::test_it_goes_on_elsewhere_and_writes",
    ),
    Mutant(
        "differentiated",
        "value if aux is None else (value, aux)",
        "value",
        "test_families.py::test_frozen_leaves_and_auxiliary_values",
    ),
    Mutant(
        "functions_of",
        "return rematerialised(block)",
        "return block",
        "test_plan.py::test_what_a_layer_keeps_is_what_jax_keeps",
    ),
    Mutant(
        "grad_of",
        "if layout.pipelined:",
        "if False:",
        "test_families.py::"
        "test_three_steps_are_those_of_one_device"
        "[data=2,stage=4,microbatches=2,zero=1,schedule=gpipe]",
    ),
    Mutant(
        "planned",
        "state.model, optimizer_rule, mesh",
        "state.model, rule, mesh",
        "test_zero.py::test_five_steps_are_those_of_one_device",
    ),
)

RUN = (
    Mutant(
        "compared",
        "if name not in _split(spec)",
        "if not _split(spec)",
        "test_fingerprint.py::"
        "test_copies_of_all_types_and_specs_are_equal_and_a_turned_bit_of_each_is_named",
    ),
    Mutant(
        "_same",
        "for dim in along:",
        "for dim in along[:1]:",
        "test_fingerprint.py::test_a_fault_that_all_copies_along_an_axis_share_is_found",
    ),
    Mutant(
        "of",
        "mixed = _mixed(bits ^ place * np.uint32(0x9E3779B9))",
        "mixed = bits * (place * np.uint32(0x9E3779B9) | np.uint32(1))",
        "test_fingerprint.py::test_the_signs_of_any_two_numbers_do_not_cancel",
    ),
    Mutant(
        "of",
        "bits ^ place * np.uint32(0x9E3779B9)",
        "bits",
        "test_fingerprint.py::test_words_are_those_by_hand",
    ),
    Mutant(
        "of",
        "for dim, stride in enumerate(strides)",
        "for dim, stride in enumerate(strides[::-1])",
        "test_fingerprint.py::test_words_are_those_by_hand",
    ),
    Mutant(
        "_bits",
        "<= 32",
        "<= 64",
        "test_fingerprint.py::test_words_are_those_by_hand -k int64",
    ),
    Mutant(
        "_bits",
        "jnp.stack([x.real, x.imag], axis=-1)",
        "x.real",
        "test_fingerprint.py -k 'by_hand or named'",
    ),
    Mutant(
        "_strays",
        "most == second or words != usual",
        "words != usual",
        "test_fingerprint.py::test_many_faults_are_named_and_the_rarest_is_first",
    ),
    Mutant(
        "_strays",
        "words != usual]",
        "words == usual]",
        "test_fingerprint.py::test_many_faults_are_named_and_the_rarest_is_first",
    ),
    Mutant(
        "_named",
        "sorted(differences, key=lambda difference: difference.alike)",
        "differences",
        "test_fingerprint.py::test_many_faults_are_named_and_the_rarest_is_first",
    ),
    Mutant(
        "uncompared",
        "if copies(spec) == 1",
        "if copies(spec) < 1",
        "test_fingerprint.py::"
        "test_copies_of_all_types_and_specs_are_equal_and_a_turned_bit_of_each_is_named",
    ),
    Mutant(
        "differing",
        "[] if same else",
        "[] if not same else",
        "test_fingerprint.py::test_many_faults_are_named_and_the_rarest_is_first",
    ),
    Mutant(
        "Skipped.count",
        "len(self.steps) > self.budget",
        "len(self.steps) > self.budget + 1",
        "test_training.py::test_the_budget_holds_over_restarts",
    ),
    Mutant(
        "Clock.__init__",
        '{} if note is None else dict(note["seconds"])',
        "{}",
        "test_training.py::test_goodput_counts_what_was_lost_and_the_time_away",
    ),
    Mutant(
        "jsonl",
        '["step"] <= after',
        '["step"] < after',
        "test_training.py::test_jsonl_goes_on_after_the_checkpoint",
    ),
    Mutant(
        "_starts",
        "% (spare + 1)",
        "% max(spare, 1)",
        "test_data.py::test_seeds_and_epochs_differ_and_offsets_reach_both_ends",
    ),
    Mutant(
        "_starts",
        "key=epoch << 64 | seed",
        "key=seed",
        "test_data.py::test_seeds_and_epochs_differ_and_offsets_reach_both_ends",
    ),
    Mutant(
        "permuted",
        "numbers >= count",
        "numbers > count",
        "test_data.py::test_any_count_is_permuted",
    ),
    Mutant("placed", "rows=slice(*bounds)", "rows=slice(None)", "test_feed.py"),
    Mutant(
        "Prefetched.__next__",
        "self._made.put((None, error))",
        "self._made.put((None, StopIteration()))",
        "test_feed.py::test_an_error_comes_at_its_step_and_stays",
    ),
    Mutant(
        "read",
        "rank, None, processes)",
        "0, None, processes)",
        "test_shards.py::test_processes_check_the_bytes_of_each_shard_once",
    ),
    Mutant(
        "read",
        "if check_bytes:\n        verify(",
        "if not check_bytes:\n        verify(",
        "test_shards.py::test_bytes_are_read_once_or_not_at_all",
    ),
    Mutant(
        "verify",
        "not stored and four_bytes",
        "stored and doubled",
        "test_shards.py::test_four_bytes_a_token_declared_as_two_are_refused",
    ),
    Mutant(
        "verify",
        "upper < UPPER and high >= 16 * UPPER",
        "False",
        "test_shards.py::test_four_bytes_a_token_without_a_record_are_refused",
    ),
    Mutant(
        "open_file",
        "stat.S_ISREG(os.fstat(file.fileno()).st_mode)",
        "True",
        "test_shards.py -k 'only_regular and pipe'",
    ),
    Mutant(
        "most_bytes",
        "+ SLACK",
        "+ SLACK**2",
        "test_manifests.py::test_files_that_are_larger_than_the_arrays_are_not_hashed",
    ),
    Mutant(
        "File._open",
        "now != self.state",
        "now.size != self.state.size",
        "test_shards.py::test_a_file_that_is_written_over_later_gives_a_line",
    ),
    Mutant(
        "take",
        "error.errno in WITHOUT_LOCKS",
        "error.errno == errno.EBADF",
        "test_lock.py::test_a_file_system_without_locks_is_told",
    ),
    Mutant(
        "_append",
        "os.truncate(path, size)",
        "pass",
        "test_training.py::test_metrics_wait_while_the_storage_fails",
    ),
    Mutant(
        "verify",
        "if high >= vocabulary:",
        "if high > vocabulary:",
        "test_shards.py::test_what_is_no_token_is_refused_where_the_hash_is_right",
    ),
    Mutant(
        "File.__getitem__",
        "np.diff(flat) != 1",
        "np.diff(flat) < 1",
        "test_shards.py::test_a_file_is_indexed_as_an_array",
    ),
    Mutant(
        "check_format",
        "stored != number",
        "stored > number + 1",
        "test_shards.py::test_another_format_and_another_type_are_refused",
    ),
    Mutant(
        "Checkpoints._wrong",
        "manifest.check_hashes(",
        "dict(",
        "test_checkpoint.py::test_damage_is_refused_by_name_and_the_one_before_is_restored",
    ),
    Mutant(
        "Checkpoints._wrong",
        "for name in share}",
        "for name in share[1:]}",
        "test_checkpoint.py::test_damage_is_refused_by_name_and_the_one_before_is_restored",
    ),
    Mutant(
        "Writer._finish",
        "                    written = True\n",
        "",
        "test_storage.py::test_arrays_that_are_written_are_not_written_again",
    ),
    Mutant("Writer._finish", "2 ** (number - 1)", "1", "test_storage.py -k goes_on_meanwhile"),
    Mutant(
        "make",
        "precision.select(taken, new",
        "precision.select(finite, new",
        "test_spikes.py -k above_the_limit",
    ),
    Mutant(
        "Spikes.limit",
        "len(self._losses) >= LEAST",
        "self._losses",
        "test_spikes.py -k running_median",
    ),
    Mutant("Spikes.count", "step > number - WINDOW", "step > 0", "test_spikes.py -k too_many"),
    Mutant(
        "Spikes.back",
        "self.past + step - first",
        "step - first",
        "test_spikes.py -k a_note_goes_on",
    ),
    Mutant(
        "Checkpoints._pass_over",
        "if step >= before",
        "if step > before",
        "test_checkpoint.py -k from_before_a_step",
    ),
    Mutant(
        "_all_finite", "[leaf.real, leaf.imag]", "[leaf.real]", "test_checkpoint.py -k every_dtype"
    ),
    Mutant("empty", "leaf.size == 0", "False", "test_checkpoint.py -k size_zero"),
    Mutant(
        "Writer._finish", " or number == self._tries", "", "test_storage.py -k goes_on_meanwhile"
    ),
    Mutant(
        "transient", "number in TRANSIENT", "number is not None", "test_storage.py -k which_errors"
    ),
    Mutant(
        "Stages.end", "error is None or transient(error)", "True", "test_storage.py -k told_at_once"
    ),
    Mutant(
        "_blocks",
        "str(shard.index)",
        "str(shard.data.shape)",
        "test_storage.py -k donated_are_there",
    ),
    Mutant(
        "remove",
        "elif inside.name != CONTENTS:",
        "else:",
        "test_checkpoint.py::test_a_removal_that_is_cut_short_says_whose_it_was",
    ),
    Mutant(
        "check_form",
        "    manifest.check_all_listed(folder, files, arrays_of(folder))\n",
        "",
        "test_manifests.py::test_a_file_that_no_manifest_lists_is_refused",
    ),
    Mutant(
        "Record.text",
        "dataclasses.asdict(self)",
        "self.step",
        "test_manifests.py -k 'number or dtype'",
    ),
    Mutant(
        "files",
        'and ".." not in parts',
        "",
        "test_manifests.py::test_a_path_that_leads_out_is_refused",
    ),
    Mutant(
        "Lock.release",
        "(self.folder / FILE).unlink()",
        "pass",
        "test_lock.py::test_a_run_that_ends_leaves_nothing",
    ),
    Mutant(
        "transient",
        'str(error).startswith("NOT_FOUND")',
        "False",
        "test_storage.py -k which_errors",
    ),
    Mutant(
        "listening",
        "(signal.SIG_IGN, None)",
        "(None,)",
        "test_signals.py::test_what_was_ignored_stays_so",
    ),
    Mutant(
        "Peers.tell",
        "if self.job.rank == 0:",
        "if False:",
        "test_peers.py::test_a_rank_that_raises_tells_the_others",
    ),
    Mutant(
        "Peers.__init__",
        'self._rank_0["name"] != self._entry["name"]',
        "False",
        "test_peers.py::test_a_rank_of_another_job_is_refused",
    ),
    Mutant(
        "Peers._run",
        "named.add(key)",
        "continue",
        "test_peers.py::test_a_rank_that_is_gone_is_named_and_the_others_end",
    ),
    Mutant(
        "initialize",
        "coordinator if _is_local(coordinator) else None",
        "None",
        "test_job.py::test_on_one_machine_others_do_not_reach_the_service",
    ),
    Mutant(
        "job_name",
        "for name in NAMES",
        "for name in NAMES[1:]",
        "test_peers.py::test_jobs_are_told_apart_by_their_variables",
    ),
    Mutant(
        "_start_limit",
        "timer.start()",
        "pass",
        "test_peers.py::test_where_a_rank_does_not_come_the_others_end_in_time",
    ),
    Mutant(
        "save",
        "earlier & {GENERATION",
        "{GENERATION",
        "test_model_files.py::test_a_save_removes_only_what_a_save_wrote",
    ),
    Mutant(
        "_loaded", "way not in PHASES or ", "", "test_bisect.py::test_another_file_is_no_record"
    ),
    Mutant(
        "_likely",
        'before[key]["count"] == entry["count"]',
        "False",
        "test_peers.py::test_who_holds_up_the_others_is_named",
    ),
    Mutant(
        "Writer.check",
        "            raise error",
        "            self._say(str(error))",
        "test_checkpoint.py::test_a_full_disk_leaves_the_newest_good_one",
    ),
    Mutant(
        "prune",
        "itertools.islice(good, retention.newest)",
        "itertools.islice(good, 1)",
        "test_checkpoint.py::test_keeps_the_last_and_every_nth",
    ),
    Mutant(
        "prune",
        " and records.is_of(path, step, settings):",
        ":",
        "test_checkpoint.py::test_what_this_run_did_not_make_stays",
    ),
    Mutant(
        "is_of",
        "folder.is_symlink()",
        "False",
        "test_checkpoint.py::test_what_this_run_did_not_make_stays",
    ),
    Mutant(
        "_measured",
        "*sorted(others, reverse=True)",
        "*sorted(others)",
        "test_checkpoint.py::test_the_newest_one_that_was_evaluated_stays_until_a_newer_one_was",
    ),
    Mutant(
        "Checkpoints._lost",
        "if self.finite(name)",
        "if False",
        "test_checkpoint.py::test_a_state_that_is_not_finite_is_neither_stored_nor_restored",
    ),
    Mutant(
        "_lost",
        "grads.norm([sum(lost[1:], start=lost[0])], axes=axes)",
        "sum(lost[1:], start=lost[0])",
        "test_training.py::test_an_update_that_is_not_finite_changes_nothing_on_any_device",
    ),
    Mutant(
        "_lost",
        " & jnp.isfinite(b)",
        "",
        "test_training.py::test_an_update_that_is_not_finite_changes_nothing_on_any_device",
    ),
    Mutant(
        "Skipped.count",
        "before > precision.LEAST",
        "False",
        "test_training.py::test_probes_of_a_larger_loss_scale_are_no_faults",
    ),
    Mutant(
        "Writer._finish",
        "            self.arrays.wait_until_finished()\n",
        "",
        "test_checkpoint.py",
    ),
    Mutant(
        "write",
        "        os.replace(partial, path)\n    finally:\n        "
        "partial.unlink(missing_ok=True)\n    _files.sync(path.parent)",
        "        os.replace(partial, path)\n    finally:\n        partial.unlink(missing_ok=True)",
        "test_checkpoint.py::test_a_manifest_is_on_the_disk_before_write_returns",
    ),
    Mutant(
        "found",
        "if _is_key(leaf) else arrays[name]",
        "if _is_key(leaf) else arrays[name].astype(jnp.float32).astype(leaf.dtype)",
        "test_checkpoint.py::test_every_leaf_comes_back_where_it_was_asked_for",
    ),
    Mutant(
        "described",
        "[str(leaf.dtype), list(leaf.shape)]",
        "[leaf.dtype.kind, list(leaf.shape)]",
        "test_checkpoint.py::test_another_state_is_refused_by_its_leaves",
    ),
    Mutant(
        "run",
        ", ending.code)\n        elif",
        ", 0)\n        elif",
        "test_job.py::test_an_exit_keeps_its_code_and_message",
    ),
    Mutant(
        "Watchdog._watch",
        "waits, began, phase = self._waits,",
        "waits, began, phase = not self._waits,",
        "test_job.py -k 'long or time'",
    ),
)

TOLD = (
    Mutant(
        "Reading._collective",
        "sent.permutes or along & axes",
        "along & axes",
        "test_lint_program.py -k 'mistake or all_reduce'",
    ),
    Mutant("after_collective", "value.differs - axes", "value.differs", "test_lint_program.py"),
    Mutant(
        "_idle",
        "for name, count in mesh.shape.items() if name != axis",
        "for name, count in mesh.shape.items()",
        "test_lint_rules.py::test_an_axis_that_splits_nothing",
    ),
    Mutant(
        "model_flops",
        "12 * L * layer.queries * T)",
        "6 * L * layer.queries * T)",
        "test_plan.py::test_operations_are_those_of_the_papers",
    ),
    Mutant(
        "span",
        "math.prod(sizes[k + 1 :])",
        "max(sizes[k + 1 :], default=1)",
        "test_plan.py::test_links_are_slow_where_a_group_leaves_its_machine",
    ),
    Mutant(
        "jobs",
        "M * v, min(M * v + 1, P)",
        "M * v, P",
        "test_plan.py::test_closed_forms_are_those_of_the_tables",
    ),
    Mutant(
        "jobs",
        "Jobs(ticks, ticks, M, last",
        "Jobs(ticks, ticks, M * v, last",
        "test_plan.py::test_closed_forms_are_those_of_the_tables",
    ),
    Mutant(
        "search",
        "key=_seconds",
        "key=id",
        "test_plan.py::test_what_is_found_is_valid_fits_and_is_ranked",
    ),
    Mutant(
        "everything",
        "2 * size.stream + 2 * size.gathered",
        "2 * size.stream + size.gathered",
        "test_plan.py::test_what_a_layer_keeps_is_what_jax_keeps",
    ),
    Mutant(
        "between_products",
        "kept + 2 * FLOAT * size.stream",
        "kept + FLOAT * size.stream",
        "test_plan.py::test_the_arrays_between_products_are_those_that_jax_computes",
    ),
    Mutant(
        "_with_arguments_kept",
        "return f(*arguments), arguments",
        "return f(*arguments), jax.tree.map(jax.numpy.zeros_like, arguments)",
        "test_remat.py",
    ),
    Mutant(
        "cudnn_attention",
        "is_causal=True",
        "is_causal=False",
        "test_flash.py::test_cudnn_is_asked_for_causal_attention_of_these_heads",
    ),
    Mutant(
        "fits_cudnn",
        "tokens % 2 == 0 and ",
        "",
        "test_flash.py::test_what_cudnn_cannot_is_computed_plainly",
    ),
    Mutant(
        "unroll_of",
        " and not layout.pipelined",
        "",
        "test_flash.py::test_layers_in_the_body_of_the_loop",
    ),
    Mutant(
        "has_kernel",
        'layout.precision != "full" and fits',
        "fits",
        "test_plan.py::test_a_plan_counts_the_kernel_of_the_recipe",
    ),
    Mutant(
        "optimizer_bytes",
        "leaf.share if layout.zero else leaf.elements",
        "leaf.elements",
        "test_plan.py::test_state_is_that_of_the_prepared_step",
    ),
    Mutant(
        "Instruction.called",
        "trips and trips + 1",
        "trips",
        "test_certificate.py::test_a_loops_condition_runs_once_more_than_its_body",
    ),
    Mutant(
        "_named",
        "ids = np.moveaxis(ids.reshape(dims), members, range(-len(members), 0))",
        "ids = np.moveaxis(ids.reshape(dims), members, range(len(members)))",
        "test_certificate.py::test_finds_the_axes",
    ),
    Mutant(
        "along",
        "np.max([np.ptp(group, axis=1) for group in coordinates], axis=0)",
        "np.ptp(coordinates[0], axis=1)",
        "test_certificate.py",
    ),
    Mutant(
        "Layout.coordinates",
        "for name in reversed(self.axes):",
        "for name in self.axes:",
        "test_layout.py::test_groups_are_those_of_the_mesh",
    ),
    Mutant("_model_and_batch", 'sizes["rows"] % (P * t)', 'sizes["rows"] % t', "test_layout.py"),
    Mutant(
        "refusal",
        "[repaired(fields, sizes, change, wording.fixed) for change in fault.changes]",
        "[dict(change) for change in fault.changes]",
        "test_layout.py::test_what_a_refusal_proposes_works",
    ),
    Mutant(
        "repaired",
        "None if set(differing) & set(fixed) else differing",
        "differing",
        "test_main.py::test_what_cannot_be_ends_with_a_sentence",
    ),
    Mutant(
        "repaired",
        "[cure for cure in fault.changes if not set(cure) & set(fixed)]",
        "list(fault.changes)",
        "test_main.py::test_what_cannot_be_ends_with_a_sentence",
    ),
    Mutant(
        "_values",
        "type(value) is not kind",
        "not isinstance(value, kind)",
        "test_argument_checks.py",
    ),
    Mutant("_counts", "if devices % processes:", "if False:", "test_layout.py"),
    Mutant(
        "_on_devices",
        "devices_left //= new[name]",
        "pass",
        "test_layout.py::test_a_model_batch_or_machine_that_does_not_fit",
    ),
    Mutant(
        "_flags",
        "{**written, **fields}",
        "fields",
        "test_main.py::test_what_is_proposed_for_a_wrong_layout_works",
    ),
    Mutant(
        "Clock.goodput",
        "counted, 1e-9",
        "1e-9",
        "test_training.py::test_goodput_counts_what_was_lost_and_the_time_away",
    ),
    Mutant(
        "from_csv",
        "(UnicodeDecodeError, csv.Error)",
        "UnicodeDecodeError",
        "test_schedule.py::test_a_file_that_is_no_table_is_refused_in_a_sentence",
    ),
    Mutant(
        "Memory.arguments",
        " + self.inputs",
        "",
        "test_trace.py::test_closed_formulas_are_the_trace",
    ),
    Mutant(
        "planned",
        "trained_leaves, owner_specs, mesh)",
        "trained_leaves, owner_specs)",
        "test_optimizers_holes.py::test_an_axis_that_is_not_there_is_refused_when_the_state_is_made",
    ),
    Mutant(
        "_Owners.init",
        "rules.check_axes(axes_of(self.axis), manual_axes)",
        "manual_axes",
        "test_optimizers_holes.py::"
        "test_an_axis_that_is_not_there_is_refused_when_the_state_is_made",
    ),
    Mutant(
        "search",
        "key not in fitting and planned.fits",
        "planned.fits",
        "test_plan.py::test_what_is_found_is_valid_fits_and_is_ranked",
    ),
    Mutant(
        "Hardware.link",
        "span > self.domain",
        "span >= self.domain",
        "test_plan.py::test_links_are_slow_where_a_group_leaves_its_machine",
    ),
)

GPT2 = (
    Mutant(
        "attention",
        "jnp.tril(jnp.ones((T, T), bool))",
        "jnp.tril(jnp.ones((T, T), bool), 1)",
        "test_gpt2_weights.py::test_later_tokens_do_not_change_earlier_logits",
    ),
    Mutant(
        "attention",
        "wide = scores.astype(precision.accumulation_dtype(scores.dtype))",
        "wide = scores",
        "test_precision.py::test_exponentials_and_roots_are_wide",
    ),
    Mutant(
        "GPT2.__init__",
        "0.02 / (2 * L) ** 0.5",
        "0.02 / L**0.5",
        "test_gpt2_weights.py::"
        "test_initial_weights_are_normal_with_smaller_ones_into_the_residual_stream",
    ),
    Mutant(
        "_dropped_heads",
        "first_head + jnp.arange",
        "jnp.arange",
        "test_step.py::test_twenty_steps_are_those_of_one_device",
    ),
    Mutant(
        "stages",
        "first_layer=position * ",
        "first_layer=0 * position * ",
        "test_pipeline.py::test_gpt2_trains_as_on_one_device -k layout0",
        long=True,
    ),
    Mutant(
        "Fields.fingerprint",
        'if not name.endswith("dropout")',
        'if name == "layers"',
        "test_model_files.py::test_a_folder_that_a_copy_left_mixed_is_refused",
    ),
    Mutant(
        "_swap",
        "(last, *sorted({*written, *gone} - {last}))",
        "sorted({*written, *gone} - {last})",
        "test_model_files.py::"
        "test_a_kill_at_any_file_operation_leaves_the_old_model_the_new_one_or_none",
    ),
    Mutant(
        "_swap",
        "for source, target in reversed(moved):",
        "for source, target in moved:",
        "test_model_files.py::test_an_error_at_any_move_puts_back_what_was_there",
    ),
    Mutant(
        "replacing",
        "if stage.is_dir():",
        "if False:",
        "test_model_files.py::"
        "test_a_kill_at_any_file_operation_leaves_the_old_model_the_new_one_or_none",
    ),
    Mutant(
        "Fields.read",
        "{*FREE, *self.free, *supported}",
        "{*FREE, *self.free}",
        "test_model_files.py::test_every_field_that_came_in_goes_out",
    ),
    Mutant(
        "Fields.read",
        "stated.keys() | (new.keys() & {*FREE, *self.free})",
        "stated.keys()",
        "test_model_files.py::test_what_the_file_leaves_out_is_left_out_again",
    ),
    Mutant(
        "Number.read",
        "for name in (*self.names, *self.aliases)",
        "for name in self.names",
        "test_model_refusals.py::test_fields_that_mean_the_same_are_taken",
    ),
    Mutant(
        "Fields._check_values",
        "type(value) is type(needed) and ",
        "",
        "test_model_refusals.py::test_fields_that_this_model_does_not_compute_are_refused_by_name",
    ),
    Mutant(
        "_widest",
        "max(dtype.itemsize",
        "min(dtype.itemsize",
        "test_model_files.py::test_the_widest_type_is_stated",
    ),
    Mutant(
        "_widest",
        "if len(largest) == 1",
        "if largest",
        "test_model_files.py::test_the_widest_type_is_stated",
    ),
    Mutant(
        "Stored.cast",
        "if np.count_nonzero(~np.isfinite(result)) >",
        "if np.count_nonzero(~np.isfinite(result)) < 0 and 1 >",
        "test_model_files.py::test_numbers_beyond_the_type_are_refused_and_infinite_ones_are_not",
    ),
    Mutant(
        "weight_map",
        'r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,200}"',
        'r".*"',
        "test_model_refusals.py::test_an_index_names_files_beside_it",
    ),
    Mutant(
        "check",
        "if name in stored and not np.array_equal(",
        "if name in stored and not (lambda *arrays, equal_nan: False)(",
        "test_gpt2_weights.py::test_every_form_gives_the_same_model",
    ),
    Mutant("check", ", equal_nan=True", "", "test_model_refusals.py -k adapters"),
    Mutant(
        "Leaf.read",
        "self._turned(",
        "(",
        "test_second_family.py::test_a_second_family_is_read_and_written_by_its_table",
    ),
    Mutant(
        "Leaf.names",
        "for _, size in self.over",
        "for _, size in reversed(self.over)",
        "test_second_family.py",
    ),
    Mutant(
        "_new",
        'numbers["vocabulary"] > _END',
        'numbers["vocabulary"] >= _END',
        "test_gpt2_weights.py::test_a_model_that_has_the_token_ends_texts_with_it",
    ),
    Mutant(
        "_placed_as",
        "if (leaf.shape, leaf.dtype) != (like.shape, like.dtype):",
        "if False:",
        "test_families.py -k begins",
    ),
    Mutant(
        "_without_cache",
        "jnp.roll(seen, -1)",
        "jnp.roll(seen, 1)",
        "test_gpt2_weights.py::test_a_sample_sees_the_last_window_and_no_more",
    ),
    Mutant(
        "embed_partial",
        "unknown & weights.astype(bool)",
        "unknown",
        "test_tensor.py::test_embed_equals_take",
    ),
    Mutant(
        "embed_partial", "is_here & ~unknown", "is_here", "test_tensor.py::test_embed_equals_take"
    ),
    Mutant("_outside", "vocabulary - 1", "vocabulary", "test_tensor.py::test_embed_equals_take"),
    Mutant(
        "seen",
        "places <= jnp.max",
        "places < jnp.max",
        "test_sampling.py::test_ids_outside_make_the_loss_nan_unless_nothing_that_counts_sees_them",
    ),
    Mutant(
        "filtered",
        "<= dropped_share",
        ">= dropped_share",
        "test_sampling.py::test_filtered_keeps_what_sets_keep",
    ),
    Mutant(
        "filtered",
        "below.at[-1].set(False)",
        "below",
        "test_sampling.py::test_filtered_keeps_what_sets_keep",
    ),
    Mutant(
        "_token_of",
        ".any() | unknown",
        ".any()",
        "test_sampling.py::test_no_token_follows_one_that_is_none",
    ),
    Mutant(
        "_as_int32",
        "or high > int32.max",
        "or high > 2**40",
        "test_data.py::test_tokens_that_do_not_fit_are_refused",
    ),
    Mutant(
        "write",
        "before=lambda: record_of(path).unlink(missing_ok=True)",
        "before=lambda: None",
        "test_data.py::test_a_write_cut_short_leaves_no_record_of_another_vocabulary",
    ),
)

ORDINARY = (
    Mutant(
        "_elementwise",
        "RIGHT in value.leaves and not split_over(aval)",
        "False",
        "test_optimizers_holes.py -k behind_a_wrapper",
    ),
    Mutant(
        "_Elements.plain",
        'value.mixes if mark == RIGHT_IF_GIVEN else ""',
        '""',
        "test_optimizers_holes.py -k vouches",
    ),
    Mutant(
        "_knows_size",
        "*(x.__defaults__ or ())",
        "*()",
        "test_optimizers_holes.py::test_a_hole_is_closed",
    ),
    Mutant(
        "_Elements._mixes",
        "inside += self.run",
        "self.run",
        "test_optimizers_holes.py::test_a_hole_is_closed",
    ),
    Mutant(
        "_split_alike",
        "not is_open and len(a.split) == 1",
        "True",
        "test_optimizers_holes.py -k made_of_another_leaf",
    ),
    Mutant(
        "_Elements._mixes",
        "if _knows_size(",
        "if False and _knows_size(",
        "test_optimizers_holes.py::test_a_hole_is_closed",
    ),
    Mutant(
        "_Elements.branches",
        "choice.mixes or choice.leaves - {WHOLE}:",
        "False:",
        "test_optimizers_holes.py::test_a_hole_is_closed -k branch",
    ),
    Mutant(
        "backward_cost",
        "return 2 if",
        "return 1 if",
        "test_schedule.py::test_default_costs_are_of_the_same_work",
    ),
    Mutant(
        "_placement",
        "if place != expected",
        "if False",
        "test_foreign_schedules.py -k in_a_sentence",
    ),
    Mutant(
        "_Update.leaf",
        "names | unnamed",
        "names",
        "test_optimizers_holes.py -k by_the_shape_is_right",
    ),
    Mutant(
        "_Elements.branches",
        "self.met(operands)._replace",
        "self.met(arguments)._replace",
        "test_by_matrix.py -k looks_at_a_leaf",
    ),
    Mutant(
        "_to_shares",
        "reversed(way.splits)",
        "way.splits",
        "test_by_matrix.py::test_by_matrix_of_shares_of_shards",
        long=True,
    ),
    Mutant("_to_owner", "shards.take(x, way.inner)", "x", "test_by_matrix.py -k is_the_optimizer"),
    Mutant(
        "_gathered_spec",
        "layers[-1] = (*layers[-1], *moved",
        "layers[-1] = (*moved, *layers[-1]",
        "test_by_matrix.py::test_by_matrix_of_shares_of_shards",
        long=True,
    ),
    Mutant("planned", "eqx.filter(model, trainable)", "model", "test_frozen.py"),
    Mutant("mean_over_microbatches", "jnp.mean(", "jnp.max(", "test_aux.py -k auxiliary"),
    Mutant("_laid_out", "AxisType.Explicit in mesh.axis_types", "False", "test_inside_jit.py"),
    Mutant(
        "terms", "based if is_base else added", "added if is_base else based", "test_lint_shards.py"
    ),
    Mutant("reached", "axes - joined_axes(program, node)", "axes", "test_lint_shards.py"),
    Mutant(
        "ShardMap.note_layers",
        " - self.exchanged - axes_sent_over",
        " - self.exchanged",
        "test_lint_shards.py -k layers_that_are_no",
    ),
    Mutant("ShardMap._gathered", "set(inner) == set(axes)", "False", "test_lint_shards.py"),
)

COMPILED = (
    Mutant(
        "_turns",
        "max(0, -(first // step)",
        "max(0, -first // step",
        "test_targets.py::test_trips_stand_in_the_condition",
    ),
    Mutant(
        "_sum",
        "left.plus + sign * right.plus",
        "left.plus + right.plus",
        "test_targets.py::test_a_step_may_be_taken_away",
    ),
    Mutant(
        "Machine.path",
        "self.closed[dim] and ",
        "",
        "test_targets.py::test_links_of_a_torus_and_of_a_switch",
    ),
    Mutant(
        "Machine.crossing",
        "busy.get(link, 0.0) + size * seconds_per_byte",
        "size * seconds_per_byte",
        "test_targets.py::test_links_of_a_torus_and_of_a_switch",
    ),
    Mutant(
        "_Replay._send",
        "state.free[link] = begin + taken / state.speed",
        "state.free[link] = begin",
        "test_targets.py::test_a_replay_by_hand",
    ),
    Mutant(
        "_Replay._collectives",
        "[inner for inner in fused if inner.collective]",
        "[]",
        "test_targets.py::test_a_replay_by_hand",
    ),
    Mutant(
        "_in_all",
        "for of in slices.values()",
        "for of in [*slices.values()][:1]",
        "test_targets.py::test_messages_between_slices_are_read",
    ),
    Mutant(
        "joined",
        "return positions[int(number)]",
        "return int(number) % SLICE",
        "test_targets.py::test_chips_of_slices_are_found_in_the_mesh",
    ),
    Mutant(
        "joined",
        "(int(number) // SLICE - 1) * partitions",
        "int(number) // SLICE * partitions",
        "test_targets.py::test_messages_between_slices_are_read",
    ),
    Mutant(
        "_Chains._joined",
        "if operand not in self.start",
        "",
        "test_targets.py::test_fusions_of_an_asynchronous_collective_are_one_message",
    ),
    Mutant(
        "Costs.operations",
        "own = self._product(line) + self._attention(line)",
        "own = self._attention(line)",
        "test_targets.py::test_operations_and_bytes_of_a_gpu_program",
    ),
    Mutant(
        "Costs._attention",
        "0.5 if CAUSAL.search(line.attributes) else 1.0",
        "1.0",
        "test_costly.py::test_operations_of_cudnns_attention",
    ),
    Mutant(
        "_repeated",
        "sequences - i",
        "sequences",
        "test_recipe.py::test_the_positions_gradient_adds_up_parts_of_sixteen_sequences",
    ),
    Mutant(
        "default_block_tokens",
        "max(LEAST_BLOCK_TOKENS, BLOCK_TOKENS_PER_DEVICE * devices)",
        "LEAST_BLOCK_TOKENS",
        "test_cross_entropy.py::test_blocks_have_2048_tokens_or_512_for_each_device",
    ),
    Mutant(
        "_sum",
        "left.element is None and sign > 0",
        "left.element is None",
        "test_targets.py::test_a_step_may_be_taken_away",
    ),
    Mutant(
        "compile",
        "{used[1]} of {used[2]}",
        "{used[2]} of {used[1]}",
        "test_targets.py::test_a_step_that_does_not_fit_says_what_it_needs",
    ),
    Mutant(
        "check_backend", "if backend != platform:", "if False:", "test_targets.py::test_refusals"
    ),
)

EXPERTS = (
    Mutant(
        "top_k",
        "jnp.take_along_axis(scores, chosen",
        "jnp.take_along_axis(preferred, chosen",
        "test_experts.py::test_one_layer_is_all_experts_on_all_tokens",
    ),
    Mutant(
        "_table",
        'side="right"',
        'side="left"',
        "test_experts.py::test_one_layer_is_all_experts_on_all_tokens",
    ),
    Mutant(
        "_table",
        "jnp.where(is_pair, read, rows), jnp.where(is_pair, pair, pairs)",
        "read, pair",
        "test_experts.py::test_one_layer_is_all_experts_on_all_tokens",
    ),
    Mutant(
        "_loops",
        "cotangent * scale",
        "cotangent",
        "test_experts.py::test_one_layer_is_all_experts_on_all_tokens",
    ),
    Mutant(
        "exchanged.__call__",
        "wanted.rank < room",
        "wanted.rank <= room",
        "test_experts.py::test_what_finds_no_room_adds_nothing_and_is_counted",
    ),
    Mutant(
        "_wanted",
        "ids.T.reshape(-1)",
        "ids.reshape(-1)",
        "test_experts.py::test_what_finds_no_room_adds_nothing_and_is_counted",
    ),
    Mutant(
        "_Exchange.of",
        "jnp.clip(room - before(wanted_rows, 0), 0, wanted_rows)",
        "jnp.minimum(wanted_rows, room)",
        "test_experts.py::test_what_finds_no_room_adds_nothing_and_is_counted",
    ),
    Mutant(
        "Gathered.__call__",
        " - axis.index() * local_experts",
        "",
        "test_experts.py::test_one_layer_is_all_experts_on_all_tokens",
    ),
    Mutant(
        "exchanged.sent",
        "rows * 4",
        "rows * 8",
        "test_experts.py::test_bytes_in_the_compiled_program_are_those_of_the_formula",
    ),
    Mutant(
        "statistics",
        "load, shares, z, entropy = axis.all_mean((chosen, jnp.mean(choice.shares, axis=1), z, "
        "entropy))",
        "load, shares = chosen, jnp.mean(choice.shares, axis=1)",
        "test_experts.py::test_one_layer_is_all_experts_on_all_tokens",
    ),
    Mutant(
        "rebalanced",
        "jnp.sign(mean - load)",
        "jnp.sign(load - mean)",
        "test_experts.py::test_five_steps_of_a_decoder_are_those_of_one_device -k tensor",
    ),
    Mutant(
        "local_chunks",
        "[:, axis.index()]",
        "[:, 0 * axis.index()]",
        "test_branching.py::test_one_device_equals_a_pipeline_of_any_placement",
    ),
    Mutant(
        "unpipelined",
        "arrays = from_placement(arrays, placement)",
        "arrays = arrays",
        "test_branching.py::test_one_device_equals_a_pipeline_placed_in_a_v",
    ),
    Mutant(
        "stored",
        "w = from_placement(w, placement)",
        "w = w",
        "test_branching.py::test_layers_are_stored_in_the_order_of_the_model",
    ),
    Mutant(
        "_into_stages",
        "return blocks if schedule is None else pipeline.to_placement(blocks, schedule.placed)",
        "return blocks",
        "test_families.py::test_a_pipeline_in_the_shape_of_a_v_goes_on_elsewhere",
    ),
    Mutant(
        "_check_varies",
        "if same:",
        "if False:",
        "test_experts.py::test_refusals",
    ),
    Mutant(
        "_placement",
        "isinstance(rule, experts) and used_already",
        "used_already",
        "test_rules.py::test_refusals",
    ),
    Mutant(
        "_batch_refused",
        " and not p.is_expert",
        "",
        "test_experts.py::test_five_steps_of_a_decoder_are_those_of_one_device -k tensor",
    ),
    Mutant(
        "grad_of",
        "grads.averaged(grad, reduced_over, reduced=",
        "grads.averaged(grad, sharded_over, reduced=",
        "test_llama_experts.py::test_five_steps_are_those_of_all_experts_on_all_tokens -k sequence",
        long=True,
    ),
    Mutant(
        "statistics",
        "(sequences * counted)",
        "sequences",
        "test_llama_experts.py::test_what_finds_no_room_is_counted_in_the_info_of_a_step",
    ),
    Mutant(
        "_with_aux_by_layer",
        "leaf.reshape(-1, *leaf.shape[2:])",
        "leaf.reshape(-1, *leaf.shape[2:])[::-1]",
        "test_llama_experts.py::test_the_info_of_a_step_tells_of_each_layer -k interleaved",
        long=True,
    ),
    Mutant(
        "_scaled",
        " * scale.astype(dtype)",
        "",
        "test_llama_experts.py::test_auxiliary_losses_are_scaled_in_float16",
        long=True,
    ),
    Mutant(
        "_with_local_loss",
        "varying(result.loss, axis.names)",
        "result.loss",
        "test_llama_experts.py::test_five_steps_are_those_of_all_experts_on_all_tokens -k 'stage "
        "and context'",
        long=True,
    ),
    Mutant("mixed", "normalised=True", "normalised=False", "test_llama_weights.py -k whole"),
    Mutant(
        "run_blocks",
        "jnp.sum(losses)",
        "losses[0]",
        "test_llama_experts.py::test_the_info_of_a_step_tells_of_each_layer",
        long=True,
    ),
)

LLAMA = (
    Mutant(
        "attended_groups",
        "comms.axis.index() * heads",
        "comms.axis.index() * 0",
        "test_llama.py::test_heads_on_every_device_may_be_more_than_are_needed",
    ),
    Mutant(
        "attended_groups",
        "if not (splits_queries and has_all):",
        "if not (heads % sharers == 0 or sharers % heads == 0):",
        "test_llama.py::test_a_shard_with_other_heads_is_refused",
    ),
    Mutant(
        "comms",
        "varying(weight, axis.names)",
        "tensor.copy_to(weight, axis)",
        "test_llama.py::test_heads_on_every_device_may_be_more_than_are_needed",
    ),
    Mutant(
        "split_groups",
        "groups % devices and devices % groups",
        "False",
        "test_llama.py::test_groups_that_neither_divide_the_devices_nor_are_divided_are_refused",
    ),
    Mutant(
        "grouped",
        "query + first",
        "query",
        "test_llama.py::test_grouped_attention_is_that_of_each_head",
    ),
    Mutant(
        "grouped",
        "max(H // sharers, 1) != G",
        "H // sharers > G",
        "test_llama.py::test_groups_that_were_not_picked_are_refused",
    ),
    Mutant(
        "rotary",
        "fast + (1 - fast) / scaling.factor",
        "1 - fast + fast / scaling.factor",
        "test_llama_weights.py -k whole",
    ),
    Mutant(
        "rotated",
        "b * cosine + a * sine",
        "b * cosine - a * sine",
        "test_llama_weights.py -k whole",
    ),
    Mutant(
        "_rope",
        "rope.setdefault(name, value) != value",
        "rope.setdefault(name, value) is None",
        "test_llama_weights.py -k by_name",
    ),
    Mutant(
        "_rope",
        "if unknown := sorted(",
        "if unknown := 0 and sorted(",
        "test_llama_weights.py -k by_name",
    ),
    Mutant("_run", "*caches[0], first=first", "*caches[0], first=0", "test_cached.py -k likeliest"),
    Mutant(
        "sampled",
        "window - ids.size + 1",
        "window - ids.size + 2",
        "test_cached.py::test_kept_keys_and_values_change_no_token",
    ),
    Mutant("_missing", "max(min(b, d), a, c)", "min(b, d)", "test_move.py::test_bits_and_bytes"),
    Mutant(
        "_missing",
        "missing -= volume",
        "missing += 0 * volume",
        "test_move.py::test_bits_and_bytes",
    ),
    Mutant(
        "known",
        " and not config.experts",
        "",
        "test_plan.py::test_the_sizes_of_another_model_are_refused",
    ),
)

CONTEXT = (
    Mutant(
        "zigzag", "2 * n - 1 - i", "n + i", "test_context.py::test_the_table_counts_what_is_needed"
    ),
    Mutant(
        "chunk_table",
        "numbers != list(range(len(numbers)))",
        "False",
        "test_context.py::test_errors",
    ),
    Mutant(
        "block_pairs",
        "chunks[i, a] > chunks[j, b]",
        "chunks[i, a] >= chunks[j, b]",
        "test_context.py::test_the_table_counts_what_is_needed",
    ),
    Mutant(
        "block_pairs",
        "(i - h) % n",
        "(i + h) % n",
        "test_context.py::test_equals_one_device[zigzag-4]",
    ),
    Mutant("_chunk", "tokens % (n * c)", "tokens % n", "test_context.py::test_errors"),
    Mutant(
        "merge_softmax",
        "jnp.logaddexp(lse, more_lse)",
        "jnp.maximum(lse, more_lse)",
        "test_context.py::test_equals_one_device[zigzag-4]",
    ),
    Mutant(
        "_forward",
        "jnp.where(is_needed == 1, lse, -jnp.inf)",
        "lse",
        "test_context.py::test_equals_one_device[contiguous-4]",
    ),
    Mutant(
        "_forward",
        "peak + jnp.log(divisor)",
        "peak",
        "test_context.py::test_equals_one_device[zigzag-4]",
    ),
    Mutant(
        "_backward",
        "jnp.where(is_needed == 1, lse, jnp.inf)",
        "lse",
        "test_context.py::test_equals_one_device[contiguous-4]",
    ),
    Mutant(
        "_backward",
        "visit(dq, ring.send(sums), keys, ring.pairs(h))",
        "visit(dq, sums, keys, ring.pairs(h))",
        "test_context.py::test_equals_one_device[zigzag-5]",
    ),
    Mutant(
        "_backward",
        "jax.tree.map(jnp.add, local_sums, ring.send(sums))",
        "ring.send(sums)",
        "test_context.py::test_equals_one_device[zigzag-4]",
    ),
    Mutant(
        "_scores",
        "k_marks.positions[None, None, :] <=",
        "k_marks.positions[None, None, :] <",
        "test_context.py::test_equals_one_device[zigzag-1]",
    ),
    Mutant(
        "_scores",
        "if k_marks.is_token is not None:",
        "if False:",
        "test_context.py::test_equals_one_device[zigzag-4]",
    ),
    Mutant(
        "_tiles",
        "lax.optimization_barrier((of_queries[0], q_positions, q_segments))",
        "(None, q_positions, q_segments)",
        "test_context.py::test_no_array_grows_with_the_square_of_the_tokens",
    ),
    Mutant(
        "ulysses",
        "jnp.repeat(x, copies, axis=2)",
        "jnp.tile(x, (1, 1, copies, 1))",
        "test_context.py::test_equals_one_device[ulysses-3]",
    ),
    Mutant(
        "comms",
        "inner_comms.local_tokens(context_tokens(x, dim), dim)",
        "context_tokens(inner_comms.local_tokens(x, dim), dim)",
        "test_context_models.py -k sequence",
    ),
    Mutant(
        "embed",
        "comms.context_tokens(attended, dim=1)",
        "attended",
        "test_context_models.py -k data",
    ),
    Mutant(
        "apply",
        "comms.wrap_attention(attend)(*heads(y))",
        "attend(*heads(y))",
        "test_context_models.py -k data",
    ),
    Mutant(
        "_attention_with_dropout",
        "if comms.context_shards > 1:",
        "if False:",
        "test_context_models.py::test_refusals",
    ),
    Mutant(
        "check_heads",
        "if q_axes and G > 1:",
        "if False:",
        "test_context.py::test_keys_that_nobody_picked_are_refused",
    ),
    Mutant("_check_heads_of_model", "needed != G or ", "", "test_context.py::test_errors"),
    Mutant(
        "grad_of",
        "setup.along(SHARDED_OVER)",
        "setup.along(SHARDED_OVER[:1])",
        "test_context_layouts.py::test_a_context_axis_trains_as_one_device",
    ),
    Mutant(
        "must_communicate",
        "if not any(",
        "if False and not any(",
        "test_context_layouts.py -k ignores_the_axis",
    ),
    Mutant(
        "_moves_along",
        "sent_along <= names",
        "sent_along & names",
        "test_context_layouts.py -k gathered_weights",
    ),
    Mutant(
        "_check",
        "family.context_attention is not None and compute.attention is None",
        "family.context_attention is not None",
        "test_context_layouts.py -k ignores_the_axis",
    ),
    Mutant(
        "_tokens_divisor",
        "math.lcm(2, t)",
        "t",
        "test_layout.py::test_a_model_batch_or_machine_that_does_not_fit",
    ),
    Mutant(
        "ends_with",
        "jnp.cumsum(ends, axis=1) - ends",
        "jnp.cumsum(ends, axis=1)",
        "test_documents.py -k packed_window",
    ),
    Mutant(
        "with_segments",
        "jnp.where(same, weights, jnp.zeros_like(weights))",
        "weights",
        "test_documents.py -k packed_window",
    ),
    Mutant(
        "_with_segments",
        "comms.context_tokens(segments, dim=1)",
        "segments",
        "test_documents.py -k train_over_context",
        long=True,
    ),
    Mutant(
        "requires_segments",
        "== [True]",
        "!= []",
        "test_documents.py::test_layers_that_do_not_read_the_documents_are_refused",
    ),
    Mutant(
        "attention", "sees & (segments", "sees | (segments", "test_documents.py -k dropped_within"
    ),
)

BY_NUMPY = "test_islands.py::test_islands_are_those_of_numpy"
ISLANDS = (
    Mutant(
        "_Round.sent",
        "outer.astype(kind) - local.astype(kind)",
        "local.astype(kind) - outer.astype(kind)",
        BY_NUMPY,
    ),
    Mutant("_Round.sent", "x / jnp.maximum(count, 1).astype(x.dtype)", "x", BY_NUMPY),
    Mutant("_Round.sent", "jnp.sum(present)", "jnp.asarray(axis_size(names))", BY_NUMPY),
    Mutant(
        "_Round.received",
        "jnp.where(sent.present[0], _mixed(new, old, self.mixing), old)",
        "new",
        BY_NUMPY,
    ),
    Mutant(
        "_Round.received",
        "jnp.where(sent.some, new.astype(old.dtype), old)",
        "new.astype(old.dtype)",
        BY_NUMPY,
    ),
    Mutant(
        "_mixed",
        "else mixing * old + (1 - mixing) * new",
        "else mixing * new + (1 - mixing) * old",
        f"{BY_NUMPY} -k mixing",
    ),
    Mutant("local", "every * k // len(parts)", "0", f"{BY_NUMPY} -k fragments"),
    Mutant(
        "local", "_is_due(inner.step - stream.delay,", "_is_due(inner.step,", f"{BY_NUMPY} -k delay"
    ),
    Mutant(
        "_stacked",
        "eqx.tree_at(_step_of, stacked, inner.step)",
        "stacked",
        BY_NUMPY,
    ),
    Mutant(
        "_Round._total",
        "jnp.where(is_present, jnp.zeros((), before.dtype), before)",
        "jnp.zeros((), before.dtype)",
        "test_islands.py -k int8",
    ),
    Mutant("_check_alone", "if any(", "if not any(", "test_islands.py::test_refusals"),
)

DRAWN = (
    Mutant(
        "_curve",
        "(span.stop, -1)",
        "(span.start, -1)",
        "test_draw.py::test_microbatches_in_flight_over_time_by_hand",
    ),
    Mutant("_curve", "count / schedule.chunks", "count", "test_draw.py -k in_flight_are_at_most"),
    Mutant(
        "_mean",
        "count * (stop - start)",
        "count",
        "test_draw.py::test_microbatches_in_flight_over_time_by_hand",
    ),
)


TRACED = (
    Mutant(
        "Reading._zeros",
        "value.is_zeros = True",
        "value.is_zeros = False",
        "test_trace.py::test_a_cpu_keeps_zeros_from_a_loop_to_the_gather_that_begins_with_them_too",
    ),
    Mutant(
        "has_effects",
        '!= "NamedAxisEffect"',
        '!= ""',
        "test_trace.py::test_a_sum_that_nothing_reads_is_not_sent",
    ),
    Mutant(
        "Reading._loop",
        "self.times *= trips",
        "self.times *= 1",
        "test_trace.py::test_a_step_by_hand "
        "test_trace.py::test_elementwise_results_are_fused_and_loops_write_in_place",
    ),
    Mutant(
        "peak",
        "until[made] = last[made]",
        "until[made] = end",
        "test_trace.py::test_elementwise_results_are_fused_and_loops_write_in_place "
        "test_trace.py::test_what_is_kept_for_the_backward_pass_is_counted_and_remat_keeps_less",
    ),
    Mutant(
        "_Step.over_replicas",
        "layers = self.size.layers if shares_parameters else 1",
        "layers = 1",
        "test_trace.py::test_zero_3_gathers_each_layer_by_itself",
    ),
    Mutant(
        "Reading._shard_map",
        "buffer.bytes = self.blocks[buffer] = max(block, self.blocks.get(buffer, 0))",
        "pass",
        "test_trace.py::test_a_step_by_hand",
    ),
    Mutant(
        "_Step.all_gather",
        "[::-1]",
        "",
        "test_plan.py::test_messages_are_as_many_as_the_traced_step_sends",
    ),
    Mutant(
        "by_matrix",
        "ndim > 3",
        "ndim > 4",
        "test_by_matrix.py::test_more_than_three_dims_need_a_number_of_layers",
    ),
    Mutant(
        "_keeps_the_rest",
        "used.issuperset(map(id, wrappers))",
        "True",
        "test_rules.py::test_the_rule_that_keeps_the_rest_whole_may_find_no_rest",
    ),
    Mutant(
        "empty_like",
        "and block.size",
        "and False",
        "test_collectives.py::test_vmap_over_an_axis_of_an_explicit_mesh",
    ),
    Mutant(
        "daly",
        "part**2 / 9) - save",
        "part**2 / 9) + save",
        "test_plan_faults.py::test_no_interval_loses_less",
    ),
    Mutant("destinations", "* group.stride", "* 1", "test_networks.py -k own_next_device"),
    Mutant(
        "Nested.round",
        "level.link.beta * level.shared",
        "level.link.beta",
        "test_networks.py::test_links_that_messages_share",
    ),
)

ALARM = "test_bisect.py::test_no_alarm_in_a_right_layout"
BISECT = (
    Mutant("_form", "1 / parts if backward or is_mean else 1.0", "1.0", ALARM),
    Mutant(
        "_form", "set(mark.varying) - block_axes - terms if backward else terms", "terms", ALARM
    ),
    Mutant(
        "_places",
        "block * form.microbatches + report.microbatch",
        "block + report.microbatch",
        ALARM,
    ),
    Mutant(
        "_tap",
        '-1 if name == "layer" else 0',
        "0",
        "test_bisect.py::test_a_dim_of_vmap_is_the_batch",
    ),
    Mutant(
        "at",
        "with set_xla_metadata(tapped_at=str(next(_ENTERED))):",
        "with contextlib.nullcontext():",
        "test_bisect.py::test_a_function_that_was_traced_before_is_at_its_own_layer",
    ),
    Mutant(
        "recording",
        "with set_xla_metadata(tapped_run=str(next(_RECORDINGS))):",
        "with contextlib.nullcontext():",
        "test_bisect.py::test_traces_are_not_shared_with_a_recording",
    ),
    Mutant(
        "_form",
        "microbatches if mark.in_microbatch else 1",
        "microbatches",
        "test_bisect.py::test_rows_outside_of_the_loop_over_microbatches_are_whole",
    ),
    Mutant(
        "_has_others",
        "report.way == BACKWARD or kept is value",
        "True",
        "test_bisect.py::test_values_of_one_name_are_reported",
    ),
    Mutant(
        "_order", "-x for x in place", "x for x in place", "test_bisect.py::test_a_fault_is_named"
    ),
    Mutant(
        "compare", "if not off <= allowed", "if off > 2", "test_bisect.py::test_a_fault_is_named"
    ),
    Mutant(
        "_placed_as",
        "may_alias=False",
        "may_alias=True",
        "test_leaves.py::test_a_given_model_keeps_its_arrays",
    ),
    Mutant(
        "_check_split",
        "for leaf in split or leaves",
        "for leaf in (split or leaves)[1:]",
        "test_islands.py::test_refusals",
    ),
    Mutant(
        "comms_of",
        " and not layout.pipelined",
        "",
        "test_flash.py::test_only_tpus_without_stages_have_three_products",
    ),
    Mutant(
        "_run",
        "jobs = jobs.after(entered)",
        "pass",
        "test_pipeline_ends.py::test_on_a_cpu_all_parameters_wait_for_the_first_embedding",
    ),
    Mutant(
        "ends_of",
        'rows = "table" if config.tied else "head"',
        'rows = "head"',
        "test_plan.py::test_traffic_of_a_llama_in_a_pipeline_is_that_of_the_program",
        long=True,
    ),
    Mutant(
        "stages",
        "recording.only_if(is_used)",
        "recording.only_if(True)",
        "test_bisect_layouts.py::test_no_alarm_where_stages_share_the_embedding",
    ),
    Mutant(
        "_SliceReader._outside",
        "operands = operands[1:]",
        "pass",
        "test_bisect.py::test_what_a_branch_and_a_loop_take_is_followed",
    ),
    Mutant(
        "_SliceReader._outside",
        "operands[first : first + second] if of_step",
        "operands[second : first + second] if of_step",
        "test_bisect.py::test_what_a_branch_and_a_loop_take_is_followed",
    ),
    Mutant(
        "_SliceReader._outside",
        "outside.append((after, self._inside(step, body.parent, body.eqn)))",
        "pass",
        "test_bisect.py::test_a_fault_is_named",
    ),
    Mutant(
        "job",
        "jnp.where(valid, microbatch, -1)",
        "microbatch",
        "test_bisect_layouts.py::test_no_alarm_in_a_drawn_layout",
        long=True,
    ),
    Mutant(
        "Programs._trace_head",
        "self.counts: Counts = self.last",
        "self.counts: Counts = True",
        ALARM,
    ),
    Mutant(
        "record",
        "values = argument_values | tapped",
        "values = tapped",
        "test_bisect.py::test_other_arguments_are_named_before_all_else",
    ),
    Mutant(
        "residual",
        "comms.local_tokens(_positions(x.shape[1] * comms.token_shards), dim=0)",
        "_positions(x.shape[1])",
        "test_bisect_layouts.py::test_no_alarm_over_context_replica_and_expert",
        long=True,
    ),
    Mutant(
        "_rounded",
        "> _largest(errors) / 4",
        "> 2 * _largest(errors)",
        "test_bisect.py::test_a_factor_is_no_rounding",
    ),
)

KERNELS = "test_same_bits.py::test_a_few_kernels_have_the_same_bits_on_every_mesh"
SAME_BITS = (
    # A kernel for all cells at once
    Mutant(
        "Walk._for_each_cell",
        "lax.map(along_others, sliced)",
        "jax.vmap(along_others)(sliced)",
        KERNELS,
        bits=True,
    ),
    # A cell whose kernels the compiler joins with those around it
    Mutant("Walk._for_each_cell", "_apart(cell)", "cell", KERNELS, bits=True),
    # The devices' sum in an order of its own
    Mutant(
        "Cells.tree",
        "x = join(x, lax.ppermute(x, axis, [(k, k ^ 2**bit) for k in range(n)]))",
        "x = lax.psum(x, axis) if bit == 0 else x",
        KERNELS,
        bits=True,
    ),
    # Cells that are no branch of the tree
    Mutant(
        "Cells.tree",
        "lax.slice_in_dim(x, k, None, 2, at)",
        "jnp.split(x, 2, at)[k]",
        KERNELS,
        bits=True,
    ),
    # Equal instructions, which the compiler joins for several devices only
    Mutant(
        "Walk.once",
        "self.done[entry][1]",
        "f(*operands)",
        "test_same_bits.py::test_equal_instructions_are_simplified_alike_on_one_device_and_on_two",
        bits=True,
    ),
    Mutant(
        "Cells.tree",
        "x * self.counts[axis] if join is lax.add else x",
        "x",
        "test_same_bits.py::test_by_cells_as_by_devices -k shared",
    ),
)

BY_HAND = (
    *ISLANDS,
    *SAME_BITS,
    *COLLECTIVES,
    *LAYERS,
    *EXPERTS,
    *PIPELINE,
    *PLACEMENT,
    *ORDINARY,
    *RUN,
    *TOLD,
    *GPT2,
    *LLAMA,
    *CONTEXT,
    *COMPILED,
    *TRACED,
    *BISECT,
    *DRAWN,
)

# Those that may survive: why the behaviour is the same.
NO_FAULT: dict[tuple[str, str, str], str] = {
    (
        "operands",
        "len(node.outputs) > 1",
        "len(node.outputs) >= 1",
    ): "Of one operand and one result, the one is the other's.",
}
