//! The counters behind `/metrics`.

use std::sync::atomic::{AtomicU64, Ordering};

use canopy_e2e::engine::{EmittedToken, EngineStats, FinishReason, StreamStats, TokenOrigin};
use metrics::{Counter, Gauge, Histogram, Unit};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle, PrometheusRecorder};

use super::process;
use crate::queue::Queue;

const SECONDS: [f64; 14] = [0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0];
const LENGTHS: [f64; 12] = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 10.0, 12.0, 14.0, 16.0];

/// Records after which the histograms' raw samples are folded, scraped or not.
const FOLD_EVERY: u64 = 4096;

/// The server's counters. Each value has its own registry, so that servers in one process do not mix.
pub struct Metrics {
    recorder: PrometheusRecorder,
    handle: PrometheusHandle,
    series: Series,
    records: AtomicU64,
}

struct Series {
    running: Gauge,
    waiting: Gauge,
    admitted: Gauge,
    refused: Counter,
    connections: Gauge,
    slots: Gauge,
    free_slots: Gauge,
    failed_rounds: Counter,
    replayed_passes: Counter,
    plain_passes: Counter,
    refused_recordings: Counter,
    recordings: Gauge,
    recording_bytes: Gauge,
    non_finite: Counter,
    cache_entries: Gauge,
    cache_bytes: Gauge,
    cache_hits: Counter,
    cache_misses: Counter,
    cache_evictions: Counter,
    cached_tokens: Counter,
    memory: Gauge,
    cpu: Gauge,
    files: Gauge,
    prompt_tokens: Counter,
    drafted_tokens: Counter,
    bonus_tokens: Counter,
    rounds: Counter,
    nodes: Counter,
    committed: Counter,
    acceptance_length: Histogram,
    first_token: Histogram,
    total: Histogram,
    stages: [Histogram; 6],
}

impl std::fmt::Debug for Metrics {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

impl Metrics {
    /// Counters at zero.
    pub fn new() -> Result<Self, metrics_exporter_prometheus::BuildError> {
        let recorder = PrometheusBuilder::new()
            .set_buckets_for_metric(Matcher::Suffix("_seconds".into()), &SECONDS)?
            .set_buckets_for_metric(Matcher::Suffix("_length".into()), &LENGTHS)?
            .build_recorder();
        let series = metrics::with_local_recorder(&recorder, Series::new);
        Ok(Self { handle: recorder.handle(), recorder, series, records: AtomicU64::new(0) })
    }

    /// The exposition text.
    pub fn render(&self, queue: &Queue) -> String {
        let series = &self.series;
        series.admitted.set(queue.in_flight() as f64);
        series.refused.absolute(queue.refused());
        let process = [
            (&series.memory, process::resident_bytes()),
            (&series.cpu, process::cpu_seconds()),
            (&series.files, process::open_files()),
        ];
        process
            .iter()
            .filter_map(|(gauge, value)| Some((gauge, (*value)?)))
            .for_each(|(gauge, v)| gauge.set(v));
        self.handle.render()
    }

    /// One answered request: until its answer's head was ready.
    pub fn request(&self, route: &str, status: u16, seconds: f64) {
        let (route, status) = (route.to_owned(), status.to_string());
        metrics::with_local_recorder(&self.recorder, || {
            metrics::histogram!("canopy_request_seconds", "route" => route.clone()).record(seconds);
            metrics::counter!("canopy_requests_total", "route" => route, "status" => status).increment(1);
        });
    }

    /// A connection that was opened, counted until the value is dropped.
    pub fn connection(&self) -> Connection {
        self.series.connections.increment(1.0);
        Connection(self.series.connections.clone())
    }

    /// What the engine counts.
    pub fn engine(&self, stats: &EngineStats) {
        let series = &self.series;
        let (cache, passes) = (&stats.cache, &stats.passes);
        let gauges = [
            (&series.running, stats.running),
            (&series.waiting, stats.waiting),
            (&series.slots, stats.slots),
            (&series.free_slots, stats.free_slots),
            (&series.cache_entries, cache.entries),
            (&series.cache_bytes, cache.bytes),
            (&series.recordings, passes.kept),
            (&series.recording_bytes, passes.bytes),
        ];
        gauges.into_iter().for_each(|(gauge, value)| gauge.set(value as f64));
        let counters = [
            (&series.failed_rounds, stats.failed_rounds),
            (&series.non_finite, stats.non_finite),
            (&series.replayed_passes, passes.replayed + passes.recorded),
            (&series.plain_passes, passes.plain),
            (&series.refused_recordings, passes.refused),
            (&series.cache_hits, cache.hits),
            (&series.cache_misses, cache.misses),
            (&series.cache_evictions, cache.evictions),
            (&series.cached_tokens, cache.reused_tokens),
        ];
        counters.into_iter().for_each(|(counter, value)| counter.absolute(value));
    }

    /// One decode round's emitted tokens.
    pub fn acceptance_length(&self, tokens: usize) {
        self.series.acceptance_length.record(tokens as f64);
        if self.records.fetch_add(1, Ordering::Relaxed) % FOLD_EVERY == FOLD_EVERY - 1 {
            self.handle.run_upkeep();
        }
    }

    /// Emitted tokens of one step.
    pub fn tokens(&self, tokens: &[EmittedToken]) {
        let drafted = tokens.iter().filter(|token| token.origin == TokenOrigin::Drafted).count();
        self.series.drafted_tokens.increment(drafted as u64);
        self.series.bonus_tokens.increment((tokens.len() - drafted) as u64);
    }

    /// A stream's end. That of a cancelled one was counted when it was cancelled; only its work is added here.
    pub fn stream_done(&self, reason: FinishReason, stats: &StreamStats) {
        match reason {
            FinishReason::Stop => self.ended("stop"),
            FinishReason::Length => self.ended("length"),
            FinishReason::TimedOut => self.ended("timeout"),
            FinishReason::Cancelled => {}
        }
        self.series.prompt_tokens.increment(stats.prompt_tokens as u64);
        self.series.rounds.increment(stats.rounds as u64);
        self.series.nodes.increment(stats.nodes as u64);
        self.series.committed.increment(stats.committed as u64);
        let stages = &stats.stages;
        let seconds =
            [stages.prefill, stages.draft, stages.build, stages.verify, stages.accept, stages.commit];
        self.series.stages.iter().zip(seconds).for_each(|(stage, seconds)| stage.record(seconds));
        if reason != FinishReason::Cancelled {
            self.series.first_token.record(stats.first_token);
            self.series.total.record(stats.total);
        }
    }

    /// A stream that ended by an error.
    pub fn stream_failed(&self) {
        self.ended("error");
    }

    /// A stream whose reader left or fell behind.
    pub fn cancelled(&self) {
        self.ended("cancelled");
    }

    fn ended(&self, reason: &'static str) {
        metrics::with_local_recorder(&self.recorder, || {
            metrics::counter!("canopy_streams_total", "reason" => reason).increment(1);
        });
    }
}

/// An open connection.
pub struct Connection(Gauge);

impl Drop for Connection {
    fn drop(&mut self) {
        self.0.decrement(1.0);
    }
}

impl Series {
    fn new() -> Self {
        describe();
        let stage = |stage: &'static str| metrics::histogram!("canopy_stage_seconds", "stage" => stage);
        Self {
            running: metrics::gauge!("canopy_streams_running"),
            waiting: metrics::gauge!("canopy_streams_waiting"),
            admitted: metrics::gauge!("canopy_streams_admitted"),
            refused: metrics::counter!("canopy_refused_total"),
            connections: metrics::gauge!("canopy_connections"),
            slots: metrics::gauge!("canopy_slots"),
            free_slots: metrics::gauge!("canopy_slots_free"),
            failed_rounds: metrics::counter!("canopy_failed_rounds_total"),
            replayed_passes: metrics::counter!("canopy_graph_passes_total"),
            plain_passes: metrics::counter!("canopy_plain_passes_total"),
            refused_recordings: metrics::counter!("canopy_refused_recordings_total"),
            recordings: metrics::gauge!("canopy_recordings"),
            recording_bytes: metrics::gauge!("canopy_recording_bytes"),
            non_finite: metrics::counter!("canopy_non_finite_total"),
            cache_entries: metrics::gauge!("canopy_cache_entries"),
            cache_bytes: metrics::gauge!("canopy_cache_bytes"),
            cache_hits: metrics::counter!("canopy_cache_hits_total"),
            cache_misses: metrics::counter!("canopy_cache_misses_total"),
            cache_evictions: metrics::counter!("canopy_cache_evictions_total"),
            cached_tokens: metrics::counter!("canopy_cached_tokens_total"),
            memory: metrics::gauge!("process_resident_memory_bytes"),
            cpu: metrics::gauge!("process_cpu_seconds_total"),
            files: metrics::gauge!("process_open_fds"),
            prompt_tokens: metrics::counter!("canopy_prompt_tokens_total"),
            drafted_tokens: metrics::counter!("canopy_completion_tokens_total", "origin" => "drafted"),
            bonus_tokens: metrics::counter!("canopy_completion_tokens_total", "origin" => "bonus"),
            rounds: metrics::counter!("canopy_rounds_total"),
            nodes: metrics::counter!("canopy_nodes_total"),
            committed: metrics::counter!("canopy_committed_tokens_total"),
            acceptance_length: metrics::histogram!("canopy_acceptance_length"),
            first_token: metrics::histogram!("canopy_first_token_seconds"),
            total: metrics::histogram!("canopy_stream_seconds"),
            stages: ["prefill", "draft", "build", "verify", "accept", "commit"].map(stage),
        }
    }
}

fn describe() {
    use metrics::{describe_counter as counter, describe_gauge as gauge, describe_histogram as histogram};
    counter!("canopy_requests_total", "Answered requests by route and status.");
    histogram!(
        "canopy_request_seconds",
        Unit::Seconds,
        "From a request's head to its answer's head, by route."
    );
    counter!("canopy_refused_total", "Requests answered 429.");
    gauge!("canopy_connections", "Open connections.");
    gauge!("canopy_slots", "Slots of the target.");
    gauge!("canopy_slots_free", "Slots that no stream has.");
    counter!("canopy_failed_rounds_total", "Rounds that failed as a whole.");
    counter!("canopy_graph_passes_total", "Passes that ran as CUDA graphs.");
    counter!(
        "canopy_plain_passes_total",
        "Passes on CUDA that could have run as graphs and were launched kernel by kernel."
    );
    counter!("canopy_refused_recordings_total", "Passes that could not be recorded as CUDA graphs.");
    gauge!("canopy_recordings", "CUDA graphs kept.");
    gauge!("canopy_recording_bytes", "Bytes of device memory that the CUDA graphs share.");
    counter!("canopy_non_finite_total", "Streams that ended because a value was not finite.");
    gauge!("canopy_cache_entries", "Saved prefixes.");
    gauge!("canopy_cache_bytes", "Bytes of saved prefixes.");
    counter!("canopy_cache_hits_total", "Prompts that started from a saved prefix.");
    counter!("canopy_cache_misses_total", "Prompts that could have and did not.");
    counter!("canopy_cache_evictions_total", "Saved prefixes dropped to make room.");
    counter!("canopy_cached_tokens_total", "Prompt tokens that saved prefixes stood in for.");
    gauge!("process_resident_memory_bytes", Unit::Bytes, "Memory of the process.");
    gauge!("process_cpu_seconds_total", Unit::Seconds, "CPU time of the process.");
    gauge!("process_open_fds", "Open files and sockets of the process.");
    counter!("canopy_streams_total", "Ended streams by reason.");
    gauge!("canopy_streams_running", "Streams in a slot.");
    gauge!("canopy_streams_waiting", "Streams that wait for a slot.");
    gauge!("canopy_streams_admitted", "Streams that hold a place in the queue, running or waiting.");
    counter!("canopy_prompt_tokens_total", "Prompt tokens of ended streams.");
    counter!("canopy_completion_tokens_total", "Emitted tokens, drafted or bonus.");
    counter!("canopy_rounds_total", "Decode rounds of ended streams.");
    counter!("canopy_nodes_total", "Verified nodes of ended streams, roots included.");
    counter!(
        "canopy_committed_tokens_total",
        "Accepted path lengths of ended streams, summed, roots included."
    );
    histogram!(
        "canopy_acceptance_length",
        "Tokens that a decode round gained; a stream's last round is left out."
    );
    histogram!("canopy_first_token_seconds", Unit::Seconds, "From submission to the first token.");
    histogram!("canopy_stream_seconds", Unit::Seconds, "From submission to the end.");
    histogram!("canopy_stage_seconds", Unit::Seconds, "A stream's seconds in each stage of its rounds.");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_servers_in_one_process_count_apart() {
        let (one, other) = (Metrics::new().unwrap(), Metrics::new().unwrap());
        one.request("/v1/completions", 200, 0.1);
        one.acceptance_length(5);
        let queue = Queue::new(1, 2);
        let _places = queue.admit_all(3).unwrap();
        let text = one.render(&queue);
        assert!(text.contains(r#"canopy_requests_total{route="/v1/completions",status="200"} 1"#), "{text}");
        assert!(text.contains(r#"canopy_acceptance_length_bucket{le="5"} 1"#), "{text}");
        assert!(text.contains(r#"canopy_acceptance_length_bucket{le="4"} 0"#), "{text}");
        assert!(text.contains("canopy_streams_admitted 3"), "{text}");
        assert!(!other.render(&queue).contains("status="));
    }
}
