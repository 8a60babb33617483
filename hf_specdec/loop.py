"""The decoding loop: rounds of draft, verify, accept, commit until every row has ended."""

from __future__ import annotations

import secrets
from typing import Any

from transformers import PreTrainedModel
from transformers.utils import logging

from hf_specdec import host
from hf_specdec.accept import Draft
from hf_specdec.cached_model import CachedModel
from hf_specdec.drafters.base import Compilation, DraftContext, Drafter, DraftSession, checked
from hf_specdec.drafters.scheduled import scheduled
from hf_specdec.judge import Judge
from hf_specdec.noise import Noise, RoundNoise
from hf_specdec.options import SpeculationOptions
from hf_specdec.recording import Recorder
from hf_specdec.request import Request
from hf_specdec.room import Room
from hf_specdec.scorer import Scorer
from hf_specdec.state import DecodeState, Outcome
from hf_specdec.stats import SpecStats
from hf_specdec.stopping import Stopping
from hf_specdec.streaming import Stream
from hf_specdec.tracing import Tracer
from hf_specdec.verify import run_prompt, run_target

logger = logging.get_logger(__name__)


class SpeculativeLoop:
    """One `generate` call.

    Args:
        model: the target.
        drafter: what guesses its tokens.
        options: the call's options merged with the drafter's.
        request: what is to be decoded.
        streamer: a Transformers streamer, or `None`.
        is_synced: whether every pass of the target is made by all processes together.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        drafter: Drafter,
        options: SpeculationOptions,
        request: Request,
        streamer: Any = None,
        is_synced: bool = False,
    ):
        self.model, self.drafter, self.is_synced = model, drafter, is_synced
        config, num_rows = request.config, len(request.input_ids)
        self.do_sample = bool(config.do_sample)
        self.stats = SpecStats(calls=1)
        mask = host.decoder_mask(model, request.arguments)
        self.state = DecodeState(request.input_ids, mask, host.fill_id(config))
        self.vocabulary = host.vocabulary_size(model)
        longest = options.num_draft_tokens or drafter.default_num_draft_tokens
        self.request = request = request.with_room(model, longest)
        host.refuse_cache(request.cache, is_filled=False)
        if is_synced:
            request.refuse_full_cache()
        host.refuse_rope(model, request.prompt_length, request.max_length, num_rows)
        self.scorer, self.stopping = Scorer(request.processors), Stopping(request.criteria)
        self.recorder = Recorder(config, num_rows, model.config.is_encoder_decoder)
        self.judge = Judge(self.do_sample, options.rule, self.scorer, self.stopping, self.recorder)
        self.returns_cache = host.cache_wanted(config, request.cache)
        self.in_lockstep = self._needs_lockstep()
        self.has_read_ends = self.in_lockstep  # lockstep has read as far as plain does
        reads_states = any(arm.reads_states for arm in drafter.arms)
        self.target = CachedModel(
            model,
            request.cache,
            host.after_prompt(model, request.arguments),
            num_rows,
            self.state.device,
            compiled=None if reads_states else request.compiled_passes(model, longest),
            may_rearrange=num_rows > 1 and not self.in_lockstep,
        )
        self.takes_trees = self._takes_trees()
        takes_draft = host.prompt_takes_draft(config, request.arguments, request.input_ids)
        may_plant = self.takes_trees and any(arm.plants for arm in drafter.arms)
        self.room = Room(self.target, self.state, self.stopping, longest, takes_draft, may_plant)
        self.is_drawn = self.do_sample and any(self._draws(arm) for arm in drafter.arms)
        self.is_scheduled = options.is_scheduled(self.is_drawn)
        self.session = self._new_session(options)
        self.noise = self._new_noise(options)
        self.stream = Stream(streamer, self.state)  # last: up to here a call can be refused without a trace
        self.tracer = Tracer(drafter.name, self.state)

    def run(self) -> Any:
        """Decodes all rows and returns what plain `generate` would."""
        try:
            self.round()  # the prompt's pass
            self._anyone_goes_on()  # plain asks here too, before it looks at the prompt's pass: processes may differ
            with host.decoding(self.model):
                while self._anyone_goes_on():
                    self._turn()
        except BaseException:
            self._abandon_cache()
            raise
        self.drafter.stats.merge(self.stats)
        return self._output()

    def round(self) -> None:
        """One round, for all rows that have not ended."""
        is_first = self.target.num_slots == 0
        with self.stats.phase("draft"):
            limits = self.room.limits(is_first)
            noise = self._round_noise(self.room.width(max(limits), is_first))
            draft = self._draft(limits, noise)
            if is_first or not self.takes_trees:
                draft = draft.first_path()
            draft = draft.widened(self.room.width(draft.width, is_first))
        with self.stats.phase("prefill" if is_first else "verify"):
            run = run_prompt if is_first else run_target
            target_pass = run(self.target, self.state, self.request, draft, self.session.taps)
        with self.stats.phase("accept"):
            judge = self.judge.step_by_step if self.in_lockstep else self.judge.all_at_once
            outcome = judge(self.state, draft, target_pass, noise)
        with self.stats.phase("bookkeeping"):
            self._record(draft, outcome)
            # A pass reads [last token, draft], so it keeps as many tokens as it yields: those that the new ones follow.
            self.target.commit([len(tokens) for tokens in outcome.appended], outcome.positions)
            self.state.commit(outcome)
            self.session.commit(self.state, outcome, target_pass)
            self.stream.advance(self.state)
            self._drop_finished_rows()
        self.tracer.end_round(self.stats.seconds)

    def _new_session(self, options: SpeculationOptions) -> DraftSession:
        """Starts the drafter: at fixed lengths if the call wants them, else only as far as it pays."""
        drafter, capacity = self.drafter, host.capacity(self.request.cache)
        context = DraftContext(
            target=self.model,
            do_sample=self.do_sample,
            scorer=self.scorer.stateless_part(),
            draft_temperature=options.draft_temperature,
            compilation=Compilation(self.request.config, capacity) if self.target.compiled and capacity else None,
            takes_trees=self.takes_trees,
            in_lockstep=self.in_lockstep,
            is_scheduled=self.is_scheduled,
            max_length=self.stopping.max_length,
            num_draft_tokens=options.num_draft_tokens,
            arguments=self.request.arguments,
            encoder_inputs=self.request.encoder_inputs,
            reader=self.target,
        )
        if not context.is_scheduled:
            return drafter.start(context, self.state)
        return scheduled(drafter.arms, context, self.state, drafter.experience_with(self.model))

    def _new_noise(self, options: SpeculationOptions) -> Noise | None:
        if not self.do_sample:
            return None
        coupled_vocabulary = self.vocabulary if options.is_coupled else None
        stream = 0  # samples judge copies without fail, whatever the copies were made from; coins do not
        if self.is_drawn:
            # Lengths that earlier calls have taught depend on their numbers, which the global generator may repeat.
            stream = secrets.randbits(64) if self.is_scheduled else self.session.noise_stream
        return Noise(options.first_seed(), self.state.device, coupled_vocabulary, stream)

    def _anyone_goes_on(self) -> bool:
        has_ended = self.state.is_done and not any(self._unread_ends())
        return host.anyone_goes_on(self.model, has_ended, self.is_synced, self.state.device)

    def _turn(self) -> None:
        """One pass of the target; once all rows have ended, for the cache's sake or other processes'."""
        if not self.state.is_done:
            self.round()
        elif any(unread := self._unread_ends()):
            self.target.read(self.state.last_tokens())
            self.target.commit(unread)
            self.has_read_ends = True
        else:  # weights are spread over processes, and some of those go on
            self.target.position_limit = host.max_positions(self.model)
            self.target.read(self.state.last_tokens())
            self.target.commit([0] * len(self.state.rows))

    def _unread_ends(self) -> list[int]:
        """Last tokens that plain has read by the end, and we have not: those of all but the longest rows."""
        if not self.returns_cache or self.has_read_ends:
            return [0] * self.state.num_rows
        longest = max(self.state.lengths)
        return [int(length < longest) for length in self.state.lengths]

    def _needs_lockstep(self) -> bool:
        """Whether rows must advance together, or tokens be judged one by one."""
        if not self.scorer.is_stateless:
            return True
        if self.state.num_rows == 1:
            return False
        attends_anywhere = host.accepts_position_ids(self.model) and host.attends_by_mask(self.model)
        can_be_ragged = attends_anywhere and host.can_be_ragged(self.request.cache)
        if self.returns_cache or host.counts_slots(self.model, self.request.cache):
            # Closing holes would close those of the user's own mask too, which windows count and owners look for.
            can_be_ragged = can_be_ragged and self.state.is_left_padded
        return not (can_be_ragged and self.stopping.is_rowwise)

    def _takes_trees(self) -> bool:
        """Whether passes can verify trees; says so once if a drafter would have liked to draft any."""
        takes = (
            host.takes_trees(self.model, self.request.cache)
            and self.target.compiled is None
            and self.recorder.attentions is None
        )
        if not takes and any(arm.plants for arm in self.drafter.arms):
            logger.warning_once(
                "Draft trees need a model with eager or sdpa attention that takes position ids, a growing cache, "
                "passes that are not compiled and no output_attentions; in this call chains are drafted instead."
            )
        return takes

    def _draws(self, arm: Drafter) -> bool:
        """Whether a drafter draws its drafts in this call: trees are point masses."""
        return arm.draws and not (arm.plants and self.takes_trees)

    def _round_noise(self, width: int) -> RoundNoise | None:
        if self.noise is None:
            return None
        return self.noise.round(self.state.rows, self.state.num_emitted, width)

    def _draft(self, limits: list[int], noise: RoundNoise | None) -> Draft:
        if max(limits) == 0:
            return Draft.empty(len(limits), self.state.device)
        return checked(self.session.propose(self.state, limits, noise), limits, self.vocabulary)

    def _record(self, draft: Draft, outcome: Outcome) -> None:
        self.stats.target_passes += 1
        arms = draft.arms or [None] * len(self.state.rows)
        names = [name or self.drafter.name for name in arms]
        judged: list[int] | list[None] = outcome.judged or [None] * len(self.state.rows)
        counts = zip(outcome.drafted, outcome.accepted, outcome.emitted, names, judged, strict=True)
        for row, of_row in zip(self.state.rows, counts, strict=True):
            if not self.state.finished[row]:
                self.stats.record_row(*of_row)
        self.tracer.record(self.state, draft, outcome, names)

    def _drop_finished_rows(self) -> None:
        """Takes ended rows out of the passes, unless something needs the batch whole."""
        if self.in_lockstep or self.returns_cache or self.state.is_done or host.is_fixed(self.target.cache):
            return
        places = self.state.drop_finished()
        if places is not None:
            self.target.keep_rows(places)
            self.session.keep_rows(places)

    def _complete_cache(self) -> None:
        """Leaves the cache as plain `generate` does: rows from the left, only the longest one's last token unread."""
        self.target.restore_layout()
        host.stop_recording(self.target.cache)

    def _abandon_cache(self) -> None:
        """After an exception: takes unverified tokens out of a cache that its owner may use again."""
        if not self.returns_cache or self.target.num_slots == 0:
            return
        self.target.forget_interrupted_pass()
        if self.target.has_provisional:
            self.target.commit([0 if self.state.finished[row] else 1 for row in self.state.rows])
        self.target.restore_layout()
        host.stop_recording(self.target.cache)

    def _output(self) -> Any:
        if self.returns_cache:
            self._complete_cache()
        if not self.request.config.return_dict_in_generate:
            return self.state.output()
        sequences, recorded = self.state.output(), self.recorder.output()
        output = host.output_dict(
            self.model, self.request.arguments, self.target.cache, sequences=sequences, **recorded
        )
        output.stats = self.stats
        return output
