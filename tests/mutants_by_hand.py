"""Mutants chosen by hand: faults that a careful reader might let pass, each of which gives wrong behaviour without a word."""

from mutant import Mutant

BITS = "test_collectives.py::test_replicas_have_the_same_bits_of_what_was_just_computed"

COLLECTIVES = (
    Mutant(
        "computed_once",
        "lax.fori_loop(0, 2, lambda trip, y: jnp.where(trip == 1, x, y), jnp.zeros_like(x))",
        "x",
        BITS,
        bits=True,
    ),
    Mutant(
        "mover",
        "gather(computed_once(x), axis_name)",
        "gather(x, axis_name)",
        "test_collectives.py::test_what_a_device_sends_and_keeps_is_computed_once",
        bits=True,
    ),
    Mutant(
        "in_blocks",
        "return gather_blocks(block, axis_name).reshape(-1)[: x.size].reshape(x.shape)",
        "return jnp.sum(jnp.roll(gather_blocks(x, axis_name), index(axis_name), axis=0), axis=0, dtype=x.dtype)",
        "test_collectives.py::test_replicas_have_the_same_bits",
        bits=True,
    ),
    Mutant("Mover.all_mean", "x / n", "x * (1 / n)", "test_ring.py::test_meaning -k all_mean"),
    Mutant(
        "gather_blocks",
        "drop_in.apart(jnp.roll(blocks, types.index(axis_name), axis=0))",
        "jnp.roll(blocks, types.index(axis_name), axis=0)",
        "test_collectives.py::test_replicas_have_the_same_bits_of_what_is_computed_next -k halving",
        bits=True,
    ),
    Mutant("_total", "x = drop_in.computed_once(x)", "x = x", f"{BITS} -k doubling", bits=True),
    Mutant("summing", "(me - (1 + h) * direction) % n", "(me - h * direction) % n", "test_ring.py::test_meaning"),
    Mutant(
        "filling",
        "(me - h * direction) % n",
        "(me - h) % n",
        "test_collectives.py::test_meaning_type_and_gradient -k two_rings",
    ),
    Mutant(
        "together",
        "lax.fori_loop(start, n, hops, carries)",
        "lax.fori_loop(1, n, hops, carries)",
        "test_collectives.py -k 'long_walks or twelve'",
    ),
    Mutant("_in_order", "reversed(along(axis_name))", "along(axis_name)", "test_axis.py::test_one_after_the_other_is_the_group"),
    Mutant("joined", "> 1", "> 9", "test_axis.py::test_joined"),
    Mutant("Axis.of", "len(names) == len(axis)", "names", "test_axis.py::test_one_after_the_other_is_the_group"),
    Mutant("Mover.all_mean", "x / n", "x", "test_ring.py::test_meaning"),
    Mutant("_exchange", "(me - k) % n", "(me + k) % n", "test_ring.py::test_meaning"),
    Mutant("_distances", "-(-kept[-1] // 2)", "kept[-1] // 2", "test_collectives.py::test_meaning_type_and_gradient -k halving"),
    Mutant("_halves", "(second, -1)", "(second, 1)", "test_collectives.py::test_two_rings_go_in_opposite_directions"),
    Mutant(
        "hierarchical_all_reduce",
        "slow, fast = axis_name",
        "fast, slow = axis_name",
        "test_collectives.py::test_the_slow_axis_carries_a_part",
    ),
    Mutant("_mesh_order", "np.argsort(in_mesh_order).tolist()", "in_mesh_order.tolist()", "test_ring.py::test_meaning"),
    Mutant(
        "_selected",
        "jnp.where(holds, leaf, other(leaf))",
        "leaf",
        "test_replicated.py::test_ordered_keeps_a_collective_behind_a_loop",
    ),
    Mutant("_batched", "out_axes=dim", "out_axes=0", "test_replicated.py::test_linear_is_the_function_it_wraps"),
    Mutant("quantize", "[1] - 7", "[1] - 6", "test_quantized.py::test_a_message_is_near_its_numbers"),
    Mutant(
        "_gather",
        "    return values(ring.all_gather(sent, axis_name)),",
        "    found = values(ring.all_gather(sent, axis_name))\n    return jnp.where(_own(found, axis_name), part, found),",
        "test_quantized.py::test_bound",
        bits=True,
    ),
    Mutant(
        "_all_reduce",
        "jnp.where(_own(error, axis_name), lost[None], error)",
        "error",
        "test_quantized.py::test_with_error_feedback_nothing_is_lost",
    ),
    Mutant(
        "assigned",
        "filled + size > nbytes",
        "filled + size >= nbytes",
        "test_buckets.py::test_every_leaf_is_in_one_bucket_that_is_full_but_not_too_full",
    ),
    Mutant("bucketed", "ordered(parts, done)", "parts", "test_buckets.py::test_one_bucket_is_packed_at_a_time"),
    Mutant("_as_they_arrive", "if 2 * h < n:", "if 2 * h <= n:", "test_matmul.py::test_equals_the_collective_and_the_product"),
    Mutant(
        "_all_gather_matmul_backward",
        "wide(weight.dtype)",
        "weight.dtype",
        "test_matmul.py::test_sums_of_a_weights_gradient_are_wide",
    ),
    Mutant("_halving", "1 + max(took[kept:])", "max(took[kept:])", "test_cost.py::test_all_reduces"),
    Mutant(
        "fit",
        "cost.of(f, 4 * count, n)",
        "cost.of(f, count, n, itemsize=1)",
        "test_tuning.py::test_a_fit_prices_the_bytes_that_its_calls_send",
    ),
)

LAYERS = (
    Mutant("_held", "(row >= 0) & (row < rows)", "(row >= 0) & (row <= rows)", "test_tensor.py::test_embed_equals_take"),
    Mutant(
        "cross_entropy",
        "columns + axis.index() * rows < vocabulary",
        "columns + axis.index() * rows <= vocabulary",
        "test_tensor.py::test_cross_entropy_equals_log_softmax",
    ),
    Mutant(
        "enter",
        "        name=remat.GATHERED,\n",
        "",
        "test_zero.py::test_tensor_and_sequence_parallelism_move_the_same -k gathers",
        long=True,
    ),
    Mutant("mean", "jnp.mean(whole(losses))", "jnp.mean(losses)", "test_cross_entropy.py::test_equals_the_plain_loss"),
    Mutant(
        "mean",
        "zeros = like(jnp.zeros(table.shape, wide), table)",
        "zeros = like(jnp.zeros(table.shape, table.dtype), table)",
        "test_cross_entropy.py::test_narrow_inputs_have_wide_sums",
    ),
    Mutant("accumulated", "total / microbatches", "total", "test_grads.py::test_accumulated_equals_the_whole_batch"),
    Mutant("accumulated", "dtype=wide(g.dtype)", "dtype=g.dtype", "test_grads.py::test_sums_are_kept_wide"),
    Mutant("norm", "jnp.conj(x)", "x", "test_grads.py"),
    Mutant("averaged", "lambda g: g / n", "lambda g: g", "test_tuples.py::test_experts_over_data_and_expert"),
    Mutant("missing", "if name not in varying_axes(x)", "if True", "test_tuples.py::test_experts_over_data_and_expert"),
    Mutant("reduced", "if own == each", "if set(own) <= set(each)", "test_tuples.py::test_hybrid_shares"),
    Mutant(
        "_try_out",
        "_set(TELLING, telling)",
        "_set(TELLING, frozenset())",
        "test_tuples.py::test_layers_that_are_shared_out_are_refused_where_they_are_looped_over",
    ),
    Mutant("splits_of", "names[-len(own) :] != own", "False", "test_tuples.py -k outer"),
    Mutant(
        "parts",
        "if split:",
        "if False:",
        "test_tuples.py::test_layers_that_are_shared_out_are_refused_where_they_are_looped_over",
    ),
    Mutant(
        "_check_reduced",
        "many(theirs - ours)",
        "many(theirs - theirs)",
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
        "targets >= vocabulary",
        "targets > vocabulary",
        "test_cross_entropy.py::test_a_target_outside_the_vocabulary_has_no_loss",
    ),
    Mutant(
        "stacked_axes",
        "len(set(dims)) == 1",
        "False",
        "test_rules.py::test_layers_that_do_not_divide_are_never_advised_to_be_whole",
    ),
    Mutant(
        "scattered",
        "lambda _: total / n",
        "lambda _: total",
        "test_zero.py::test_five_steps_are_those_of_one_device",
    ),
    Mutant(
        "sharded",
        "over.all_reduce(gradient) if over.names else gradient\n            return total /",
        "over.all_reduce(gradient) if over.names else gradient\n            return total *",
        "test_zero.py::test_a_sharded_optimizer_is_the_optimizer",
    ),
    Mutant(
        "_scatter",
        "reduce_scatter(_wide(x),",
        "reduce_scatter(x,",
        "test_zero.py::test_sums_over_replicas_are_wide",
    ),
    Mutant(
        "adjusted",
        "jnp.where(grown, 0, good)",
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

PIPELINE = (
    Mutant(
        "backward",
        "slot = row.read[model.index]",
        "slot = row.written[model.index]",
        "test_pipeline.py::test_a_pipeline_computes_what_one_device_does",
    ),
    Mutant(
        "forward",
        "chosen(model.first & (chunk == 0)",
        "chosen(model.first",
        "test_pipeline.py::test_a_pipeline_computes_what_one_device_does",
    ),
    Mutant(
        "Model._stage",
        "chunk * self.schedule.stages + self.index",
        "chunk + self.index",
        "test_pipeline.py::test_a_pipeline_computes_what_one_device_does",
    ),
    Mutant(
        "masked",
        "jnp.where(counts, leaf, jnp.zeros((), leaf.dtype))",
        "leaf * counts.astype(leaf.dtype)",
        "test_pipeline.py::test_garbage_never_leaks",
    ),
    Mutant(
        "Schedule._places",
        "held[job] if job >= 0 else free[0]",
        "held[job] if job >= 0 else 0",
        "test_pipeline.py::test_a_pipeline_computes_what_one_device_does",
    ),
    Mutant(
        "backward",
        "d if more is None else d + masked(valid, more)",
        "d",
        "test_pipeline_trees.py::test_everything_at_once_is_as_on_one_device",
    ),
    Mutant(
        "_seed",
        "jnp.where(valid, zero + 1, zero)",
        "zero",
        "test_pipeline_refusals.py::test_a_penalty_on_the_blocks_is_a_term_of_the_stage",
    ),
    Mutant("_cut", "x.shape[dim] % t == 0", "False", "test_pipeline_trees.py::test_a_split_exchange_sends_its_part"),
    Mutant(
        "_source",
        "for other in operands(each) if id(other) not in seen",
        "for other in () if id(other) not in seen",
        "test_pipeline_refusals.py::test_a_gradient_that_would_be_missing",
    ),
    Mutant("Schedule.in_flight", " - (last >= 0)  #", "  #", "test_schedule.py::test_in_flight_is_the_formula"),
    Mutant("Schedule.asynchronous", "hop if before[0] != s else 0", "hop", "test_schedule.py"),
    Mutant("zero_bubble", "(tick + s, s, job)", "(tick, s, job)", "test_schedule.py::test_the_bubble_is_the_formula"),
    Mutant("gpipe", "(M - 1 - m)", "m", "test_schedule.py::test_gpipe_goes_back_the_way_it_came"),
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
        "column[0] if len(set(column)) == 1 else None",
        "column[0]",
        "test_rules.py::test_factored_moments_keep_the_splits_of_their_dims",
    ),
    Mutant(
        "spmd", "check_vma=True)(*arrays)", "check_vma=False)(*arrays)", "test_mesh.py::test_jax_refuses_copies_that_may_differ"
    ),
    Mutant("free", "not entry_axes(entries[dim]) and length % size == 0", "length % size == 0", "test_rules.py"),
    Mutant(
        "make_scaled",
        "jnp.isfinite(norm) & jnp.isfinite(loss)",
        "jnp.isfinite(norm)",
        "test_training.py::test_a_loss_that_is_not_finite_skips_its_step",
    ),
    Mutant(
        "sequence_keys", "jax.random.fold_in(key, step)", "key", "test_step.py::test_every_sequence_and_step_has_a_key_of_its_own"
    ),
    Mutant("loss_step", ".all_mean(loss", ".all_reduce(loss", "test_step.py::test_evaluation_is_the_loss_without_dropout"),
    Mutant(
        "_on_blocks",
        "change(family.where(model))",
        "family.where(model)",
        "test_families.py::test_it_goes_on_elsewhere_and_writes",
    ),
    Mutant(
        "differentiated",
        "value if aux is None else (value, aux)",
        "value",
        "test_families.py::test_frozen_leaves_and_auxiliary_values",
    ),
    Mutant(
        "Functions.block",
        "self.kept.block(self.replicas",
        "(self.replicas",
        "test_plan.py::test_what_a_layer_keeps_is_what_jax_keeps",
    ),
    Mutant(
        "rows",
        'STAGES[fields["stage"] > 1]',
        "STAGES[0]",
        "test_families.py::test_three_steps_are_those_of_one_device[data=2,stage=4,microbatches=2,zero=1,schedule=gpipe]",
    ),
    Mutant(
        "planned",
        "model_specs if optimizer_rule is None else rules.specs(model, optimizer_rule, mesh_, batch_axes=batch_axes)",
        "model_specs",
        "test_zero.py::test_five_steps_are_those_of_one_device",
    ),
)

RUN = (
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
    Mutant("jsonl", '["step"] <= after', '["step"] < after', "test_training.py::test_jsonl_goes_on_after_the_checkpoint"),
    Mutant("_deal", "% (spare + 1)", "% max(spare, 1)", "test_data.py::test_seeds_and_epochs_differ_and_offsets_reach_both_ends"),
    Mutant("batch", "p // windows, windows, spare", "0, windows, spare", "test_data.py"),
    Mutant("bigram", "pairs // vocabulary", "pairs % vocabulary", "test_data.py::test_baselines_equal_counting_in_dictionaries"),
    Mutant("placed", "rows=slice(*place)", "rows=slice(None)", "test_feed.py"),
    Mutant(
        "Prefetched.__next__",
        "self._made.put((None, error))",
        "self._made.put((None, StopIteration()))",
        "test_feed.py::test_an_error_comes_at_its_step_and_stays",
    ),
    Mutant(
        "read",
        "itertools.islice(files.items(), rank, None, processes)",
        "itertools.islice(files.items(), 0, None, processes)",
        "test_shards.py::test_processes_check_the_bytes_of_each_shard_once",
    ),
    Mutant(
        "Checkpoints._verify",
        'manifest.check(folder, record["files"])',
        'manifest.check_sizes(folder, record["files"])',
        "test_checkpoint.py::test_damage_is_refused_by_name_and_the_one_before_is_restored",
    ),
    Mutant(
        "Checkpoints.check",
        "            raise error",
        "            self._say(str(error))",
        "test_checkpoint.py::test_a_full_disk_leaves_the_newest_good_one",
    ),
    Mutant(
        "Checkpoints._thin",
        "finished[-self.keep :]",
        "finished[: self.keep]",
        "test_checkpoint.py::test_keeps_the_last_and_every_nth",
    ),
    Mutant("Checkpoints._finish", "            self._arrays.wait_until_finished()\n", "", "test_checkpoint.py"),
    Mutant(
        "write",
        "        os.replace(partial, path)\n    finally:\n        partial.unlink(missing_ok=True)\n    _sync_folder(path.parent)",
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
        'end("", ending.code) if isinstance(ending.code, int)',
        'end("", 0) if isinstance(ending.code, int)',
        "test_launch.py::test_an_exit_keeps_its_code_and_message",
    ),
    Mutant(
        "_own_gpus",
        'len(visible.split(",")) // job.local_processes',
        'len(visible.split(",")) // job.processes',
        "test_launch.py::test_processes_of_one_machine_share_its_gpus",
    ),
    Mutant(
        "Watchdog._watch",
        "processes.GRACE * self._waits\n",
        "processes.GRACE * (not self._waits)\n",
        "test_launch.py -k 'long or time'",
    ),
)

TOLD = (
    Mutant(
        "_differing",
        "digests.index(Counter(digests).most_common(1)[0][0])",
        "0",
        "test_lint_arrays.py::test_most_copies_are_right_wherever_the_first_is",
    ),
    Mutant(
        "Walk._collective", "sent.permutes or along & axes", "along & axes", "test_lint_program.py -k 'mistake or all_reduce'"
    ),
    Mutant("after", "value.differs - axes", "value.differs", "test_lint_program.py"),
    Mutant(
        "_idle",
        "for name, count in mesh.shape.items() if name != axis",
        "for name, count in mesh.shape.items()",
        "test_lint_rules.py::test_an_axis_that_splits_nothing",
    ),
    Mutant("model_flops", "12 * L * D * T)", "6 * L * D * T)", "test_plan.py::test_operations_are_those_of_the_papers"),
    Mutant(
        "span",
        '"stage": layout.tensor, "data": layout.tensor * layout.stage',
        '"stage": layout.tensor, "data": layout.tensor',
        "test_plan.py::test_links_are_slow_where_a_group_leaves_its_machine",
    ),
    Mutant(
        "ticks_of_one_f_one_b",
        "M * v + P - 1, M * v + P - 1, M, v * P - 1",
        "M * v + P - 1, M * v + P - 1, M * v, v * P - 1",
        "test_plan.py::test_closed_forms_are_those_of_the_tables",
    ),
    Mutant(
        "_remats", "enumerate(every)", "enumerate([*every][::-1])", "test_plan.py::test_what_is_found_is_valid_fits_and_is_ranked"
    ),
    Mutant(
        "everything",
        "4 * FLOAT * b * T / own",
        "2 * FLOAT * b * T / own",
        "test_plan.py::test_what_a_layer_keeps_is_what_jax_keeps",
    ),
    Mutant(
        "optimizer_bytes",
        "held(whole=leaf.elements, share=leaf.share)",
        "held(whole=leaf.elements, share=leaf.elements)",
        "test_plan.py::test_state_is_that_of_the_prepared_step",
    ),
    Mutant("_life", "offsets[buffer.stop + 1]", "offsets[buffer.stop]", "test_draw_memory.py"),
    Mutant(
        "live",
        "sum({shard.unsafe_buffer_pointer(): shard.nbytes for shard in shards if shard.nbytes}.values())",
        "sum(shard.nbytes for shard in shards)",
        "test_draw_memory.py::test_live_arrays",
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
        "_axes", "np.max([np.ptp(place, axis=1) for place in places], axis=0)", "np.ptp(places[0], axis=1)", "test_certificate.py"
    ),
    Mutant(
        "Layout.coordinates",
        "for name in reversed(AXES):",
        "for name in AXES:",
        "test_layout.py::test_groups_are_those_of_the_mesh",
    ),
    Mutant("_misfits", '"the vocabulary\'s padded rows", P * t', '"the vocabulary\'s padded rows", t', "test_layout.py"),
    Mutant(
        "search",
        "again >= least",
        "again > least",
        "test_plan.py::test_what_is_found_is_valid_fits_and_is_ranked",
    ),
    Mutant(
        "Hardware.link",
        "span <= self.domain",
        "span < self.domain",
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
        "wide = scores.astype(precision.wide(scores.dtype))",
        "wide = scores",
        "test_precision.py::test_exponentials_and_roots_are_wide",
    ),
    Mutant(
        "GPT2.__init__",
        "0.02 / (2 * L) ** 0.5",
        "0.02 / L**0.5",
        "test_gpt2_weights.py::test_initial_weights_are_normal_with_smaller_ones_into_the_residual_stream",
    ),
    Mutant("_dropped_heads", "first_head + jnp.arange", "jnp.arange", "test_step.py::test_twenty_steps_are_those_of_one_device"),
    Mutant(
        "stages",
        "first = position * layers",
        "first = position",
        "test_pipeline.py::test_gpt2_trains_as_on_one_device -k layout0",
        long=True,
    ),
    Mutant(
        "_check_stored", "and not np.array_equal(head.array()", "and not np.shares_memory(head.array()", "test_gpt2_weights.py"
    ),
    Mutant(
        "save",
        "for file in (weights, config):\n            os.replace",
        "for file in (config, weights):\n            os.replace",
        "test_gpt2_weights.py -k save",
    ),
    Mutant(
        "read_config",
        "default=1e-5)",
        "default=1e-6)",
        "test_gpt2_weights.py::test_fields_that_are_left_out_are_those_of_transformers",
    ),
    Mutant(
        "sampled",
        "jnp.roll(seen, -1)",
        "jnp.roll(seen, 1)",
        "test_gpt2_weights.py::test_a_sample_sees_the_last_window_and_no_more",
    ),
)

ORDINARY = (
    Mutant("joined", "{GATHERED, SAME}", "{GATHERED}", "test_optimizers_holes.py -k behind_a_wrapper"),
    Mutant(
        "Walk.compare",
        "value) != str(twin.params[name])",
        "value) != str(value)",
        "test_optimizers_holes.py::test_a_hole_is_closed -k power",
    ),
    Mutant(
        "Walk.results", "if bad is None and sizes", "if bad is None and False", "test_optimizers_holes.py::test_a_hole_is_closed"
    ),
    Mutant(
        "Walk.branches", "choice not in (UNIFORM, SAME)", "False", "test_optimizers_holes.py::test_a_hole_is_closed -k branch"
    ),
    Mutant("wholes", "min(chosen, leaf.ndim - 1)", "0", "test_optimizers_holes.py -k by_the_shape_is_right"),
    Mutant("_reads", "read[0].union(*each)", "frozenset().union(*each)", "test_by_matrix.py -k looks_at_a_leaf"),
    Mutant(
        "_to_shares",
        "reversed(way.splits)",
        "way.splits",
        "test_by_matrix.py::test_by_matrix_of_shares_of_shards",
        long=True,
    ),
    Mutant("_to_owner", "if axes_of(way.rest) else x", "if False else x", "test_by_matrix.py -k is_the_optimizer"),
    Mutant(
        "_owned_spec",
        "layers[-1] = (*layers[-1], *split",
        "layers[-1] = (*split, *layers[-1]",
        "test_by_matrix.py::test_by_matrix_of_shares_of_shards",
        long=True,
    ),
    Mutant("planned", "eqx.filter(model, trainable)", "model", "test_frozen.py"),
    Mutant("_try_out", "telling & set(varying_axes(leaf))", "False", "test_tuples.py -k looped_over"),
    Mutant("mean_of_parts", "jnp.mean(", "jnp.max(", "test_aux.py -k auxiliary"),
    Mutant("_laid_out", "AxisType.Explicit in mesh.axis_types", "False", "test_inside_jit.py"),
    Mutant("terms", "1 - is_base.index(True)", "is_base.index(True)", "test_lint_shards.py"),
    Mutant("reached", "axes - joined_axes(program, node)", "axes", "test_lint_shards.py"),
    Mutant("_Reading._layers", " - self.exchanged - sent", " - self.exchanged", "test_lint_shards.py -k layers_that_are_no"),
    Mutant("_Reading._gathered", "set(last) == set(over)", "False", "test_lint_shards.py"),
)

BY_HAND = (*COLLECTIVES, *LAYERS, *PIPELINE, *PLACEMENT, *ORDINARY, *RUN, *TOLD, *GPT2)

# Those that may survive: why the behaviour is the same.
NO_FAULT: dict[tuple[str, str, str], str] = {}
