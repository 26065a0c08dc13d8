//! A toy engine behind the real thread, router and listener, and a plain HTTP client.
//!
//! The toy emits the tokens of [`TEXT`] over and over, two a step, so that every answer is known in advance.

use std::collections::VecDeque;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, LazyLock, Mutex};
use std::time::{Duration, Instant};

use axum::body::Body;
use axum::http::{Request, StatusCode};
use canopy_e2e::constrain::{Compiler, Grammar};
use canopy_e2e::engine::{
    Constraint, EmittedToken, Event, FinishReason, GenerateRequest, PromptToken, ReportedNode, RoundReport,
    StreamId, StreamStats, TokenOrigin,
};
use canopy_e2e::loader::{self, ModelSource};
use canopy_e2e::tokenizer::Tokenizer;
use canopy_server::app::app;
use canopy_server::config::{Args, Config};
use canopy_server::engine_thread::{self, ModelInfo, Rounds, ThreadOptions};
use canopy_server::serve;
use canopy_server::state::AppState;
use canopy_server::telemetry::Metrics;
use clap::Parser as _;
use serde_json::Value;
use tower::ServiceExt as _;

/// What the toy says.
pub const TEXT: &str = "def add(a, b):\n    return a + b\n";
/// A conversation that the toy answers with [`CALL`].
pub const CALLING: &str = "Add them.";
/// A call of a tool, as Qwen3.5 writes it.
pub const CALL: &str = "Sure.\n\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=note>\n7\n\
                        </parameter>\n</function>\n</tool_call>";
/// A prompt whose stream fails.
pub const FAILING: &str = "class Failing:";
/// A prompt whose step panics.
pub const PANICKING: &str = "class Panicking:";
/// The toy's name.
pub const MODEL: &str = "toy";
/// The toy's context.
pub const CONTEXT: usize = 240;

pub static TOKENIZER: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| {
    let files = loader::resolve(&ModelSource::Embedded, true).unwrap();
    Arc::new(Tokenizer::load(&files, &[]).unwrap())
});

/// The first `tokens` tokens of the toy's text.
pub fn toy_text(tokens: usize) -> String {
    let ids = TOKENIZER.encode(TEXT).unwrap();
    let ids: Vec<u32> = ids.iter().copied().cycle().take(tokens).collect();
    TOKENIZER.decode(&ids).unwrap()
}

/// The text of one of the toy's tokens.
pub fn toy_token(at: usize) -> String {
    TOKENIZER.token_text(TOKENIZER.encode(TEXT).unwrap()[at])
}

/// Requests that reached the toy.
pub type Seen = Arc<Mutex<Vec<GenerateRequest>>>;

struct ToyStream {
    id: StreamId,
    request: GenerateRequest,
    emitted: usize,
}

/// What a step of the toy begins with; where it says no, the step emits nothing.
pub type Begin = Arc<dyn Fn() -> bool + Send + Sync>;

/// Streams at a stand: the toy's steps go on and commands are obeyed between them, but only so many steps emit something.
#[derive(Clone, Default)]
pub struct Held(Arc<AtomicUsize>);

impl Held {
    pub fn begin(&self) -> Begin {
        let Self(left) = self.clone();
        Arc::new(move || {
            let spent = left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
            if spent.is_err() {
                std::thread::sleep(Duration::from_millis(1));
            }
            spent.is_ok()
        })
    }

    /// Lets so many steps emit from now on.
    pub fn allow(&self, steps: usize) {
        self.0.store(steps, Ordering::SeqCst);
    }

    pub fn release(&self) {
        self.allow(usize::MAX);
    }
}

/// Lets so many calls pass, holds the next one and counts those that have come.
#[derive(Default)]
pub struct Gate {
    /// Calls that may pass (None: all) and calls that came.
    state: Mutex<(Option<usize>, usize)>,
    changed: Condvar,
}

impl Gate {
    pub fn pass(&self) {
        let mut state = self.state.lock().unwrap();
        state.1 += 1;
        let mut state = self.changed.wait_while(state, |state| state.0 == Some(0)).unwrap();
        if let Some(left) = state.0.as_mut() {
            *left -= 1;
        }
    }

    /// Lets `more` calls pass from now on.
    pub fn allow(&self, more: Option<usize>) {
        self.state.lock().unwrap().0 = more;
        self.changed.notify_all();
    }

    /// Calls that have come.
    pub fn begun(&self) -> usize {
        self.state.lock().unwrap().1
    }

    /// A closed one and what makes every step of a toy pass it.
    pub fn of_steps() -> (Arc<Self>, Begin) {
        let gate = Arc::new(Self::default());
        gate.allow(Some(0));
        let passing = Arc::clone(&gate);
        (gate, Arc::new(move || (passing.pass(), true).1))
    }
}

/// An engine that needs no model.
pub struct Toy {
    slots: usize,
    begin: Begin,
    running: Vec<ToyStream>,
    waiting: VecDeque<ToyStream>,
    submitted: u64,
    seen: Seen,
    text: Vec<u32>,
    cancelled: Vec<StreamId>,
}

impl Toy {
    fn events(&self, stream: &mut ToyStream) -> Vec<Event> {
        if stream.request.prompt == TOKENIZER.encode(FAILING).unwrap() {
            return vec![Event::Failed(canopy_e2e::Error::NonFinite { stream: stream.id.0, position: 3 })];
        }
        assert!(stream.request.prompt != TOKENIZER.encode(PANICKING).unwrap(), "the toy panics as asked");
        let calling = format!("<|im_start|>user\n{CALLING}<|im_end|>\n<|im_start|>assistant\n");
        let calls = stream.request.prompt.ends_with(&TOKENIZER.encode(&calling).unwrap());
        let text = if calls { TOKENIZER.encode(CALL).unwrap() } else { self.text.clone() };
        let most = if calls { text.len() } else { stream.request.max_tokens };
        let left = most - stream.emitted;
        let ids: Vec<u32> = (0..left.min(2)).map(|i| text[(stream.emitted + i) % text.len()]).collect();
        let token = |(at, &id): (usize, &u32)| EmittedToken {
            id,
            origin: if at + 1 == ids.len() { TokenOrigin::Bonus } else { TokenOrigin::Drafted },
            logprob: stream.request.logprobs.map(|_| -0.5),
            top: (0..stream.request.logprobs.unwrap_or(0))
                .map(|rank| (rank as u32, -1.0 - rank as f32))
                .collect(),
        };
        let tokens: Vec<EmittedToken> = ids.iter().enumerate().map(token).collect();
        let mut events = Vec::new();
        if let Some(top) = stream.request.prompt_logprobs.filter(|_| stream.emitted == 0) {
            let token = |(at, &id): (usize, &u32)| PromptToken {
                id,
                logprob: (at > 0).then_some(-0.25),
                top: (0..top.min(at)).map(|rank| (rank as u32, -1.0)).collect(),
            };
            events.push(Event::Prompt(stream.request.prompt.iter().enumerate().map(token).collect()));
        }
        if stream.request.report_rounds {
            let node = |at: usize, parent| ReportedNode {
                token: self.text[at],
                parent,
                depth: u32::from(parent == 0),
                prob: 0.5,
                log_prob: -0.5,
            };
            let nodes = vec![node(0, -1), node(1, 0), node(2, 0)];
            events.push(Event::Round(RoundReport {
                start: stream.emitted,
                nodes,
                path: vec![0, 2],
                bonus: ids[0],
            }));
        }
        events.push(Event::Text { text: TOKENIZER.decode(&ids).unwrap(), tokens });
        stream.emitted += ids.len();
        if stream.emitted == most {
            let rounds = stream.emitted.div_ceil(2);
            let stats = StreamStats {
                prompt_tokens: stream.request.prompt.len(),
                completion_tokens: stream.emitted,
                rounds,
                nodes: rounds * 3,
                committed: stream.emitted,
                ..StreamStats::default()
            };
            let reason = if calls { FinishReason::Stop } else { FinishReason::Length };
            events.push(Event::Done { reason, stats });
        }
        events
    }
}

impl Rounds for Toy {
    fn submit(&mut self, request: GenerateRequest, grammar: Option<Grammar>) -> canopy_e2e::Result<StreamId> {
        assert_eq!(grammar.is_some(), request.constraint != Constraint::None, "the grammar comes ready");
        let id = StreamId(self.submitted);
        self.submitted += 1;
        self.seen.lock().unwrap().push(request.clone());
        self.waiting.push_back(ToyStream { id, request, emitted: 0 });
        Ok(id)
    }

    fn cancel(&mut self, stream: StreamId) {
        self.running.retain(|running| running.id != stream);
        self.waiting.retain(|waiting| waiting.id != stream);
        self.cancelled.push(stream);
    }

    fn load(&self) -> (usize, usize) {
        (self.running.len(), self.waiting.len())
    }

    fn step(&mut self) -> canopy_e2e::Result<Vec<(StreamId, Event)>> {
        let emits = (self.begin)();
        while self.running.len() < self.slots && !self.waiting.is_empty() {
            self.running.extend(self.waiting.pop_front());
        }
        let mut running = std::mem::take(&mut self.running);
        let late = |stream: &ToyStream| stream.request.deadline.is_some_and(|at| at <= Instant::now());
        let timed_out: Vec<StreamId> = running.iter().filter(|s| late(s)).map(|stream| stream.id).collect();
        running.retain(|stream| !timed_out.contains(&stream.id));
        let ended = |id| (id, Event::Done { reason: FinishReason::Cancelled, stats: StreamStats::default() });
        let mut news: Vec<_> = self.cancelled.drain(..).map(ended).collect();
        news.extend(
            timed_out.into_iter().map(|id| {
                (id, Event::Done { reason: FinishReason::TimedOut, stats: StreamStats::default() })
            }),
        );
        running.retain_mut(|stream| {
            if !emits {
                return true;
            }
            let events = self.events(stream);
            let ended = matches!(events.last(), Some(Event::Done { .. } | Event::Failed(_)));
            news.extend(events.into_iter().map(|event| (stream.id, event)));
            !ended
        });
        self.running = running;
        Ok(news)
    }
}

/// What a test's server is like.
pub struct Setup {
    /// Command line.
    pub args: Vec<&'static str>,
    /// What a step begins with.
    pub begin: Begin,
    /// What compiles constraints.
    pub grammars: Compiler,
    /// Updates a stream may be ahead of its reader.
    pub update_buffer: usize,
}

impl Default for Setup {
    fn default() -> Self {
        let grammars = Compiler::new(Arc::clone(&TOKENIZER) as _);
        Self { args: Vec::new(), begin: Arc::new(|| true), grammars, update_buffer: 4096 }
    }
}

pub fn config(args: &[&str]) -> Config {
    Config::try_from(Args::parse_from(std::iter::once("canopy-server").chain(args.iter().copied()))).unwrap()
}

/// A state over the toy, and what reached it.
pub fn toy_state(setup: &Setup) -> (AppState, Seen) {
    let mut config = config(&setup.args);
    config.update_buffer = setup.update_buffer;
    let seen = Seen::default();
    let toy = Toy {
        slots: config.slots,
        begin: Arc::clone(&setup.begin),
        running: Vec::new(),
        waiting: VecDeque::new(),
        submitted: 0,
        cancelled: Vec::new(),
        seen: Arc::clone(&seen),
        text: TOKENIZER.encode(TEXT).unwrap(),
    };
    let info = ModelInfo {
        name: MODEL.into(),
        vocab_size: TOKENIZER.vocab_size(),
        context_len: CONTEXT,
        has_drafter: true,
        tokenizer: Arc::clone(&TOKENIZER),
        grammars: setup.grammars.clone(),
        created: 7,
        self_check: String::new(),
    };
    (state_of(config, move || Ok((Box::new(toy), info))), seen)
}

/// A state over whatever `load` returns, once that is loaded.
pub fn state_of(
    config: Config,
    load: impl FnOnce() -> canopy_e2e::Result<(Box<dyn Rounds>, ModelInfo)> + Send + 'static,
) -> AppState {
    let metrics = Arc::new(Metrics::new().unwrap());
    let options = ThreadOptions {
        threads: 1,
        update_buffer: config.update_buffer,
        command_buffer: config.slots + config.max_waiting + 1,
    };
    let (engine, loaded) = engine_thread::spawn(load, options, Arc::clone(&metrics)).unwrap();
    loaded.blocking_recv().unwrap().unwrap();
    AppState::new(config, engine, metrics)
}

/// An answer.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: Vec<u8>,
}

impl Answer {
    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {}", self.text()))
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    /// Name and data of every event.
    pub fn named_events(&self) -> Vec<(&str, &str)> {
        let mut name = "message";
        let mut events = Vec::new();
        for line in self.text().lines() {
            if let Some(event) = line.strip_prefix("event: ") {
                name = event;
            } else if let Some(data) = line.strip_prefix("data: ") {
                events.push((name, data));
            } else if line.is_empty() {
                name = "message";
            }
        }
        events
    }

    /// The data of every event without a name.
    pub fn events(&self) -> Vec<String> {
        let unnamed = self.named_events().into_iter().filter(|&(name, _)| name == "message");
        unnamed.map(|(_, data)| data.to_owned()).collect()
    }

    /// The parsed `canopy` of every event of that name.
    pub fn rounds(&self) -> Vec<Value> {
        let named = self.named_events().into_iter().filter(|&(name, _)| name == "canopy");
        named.map(|(_, data)| serde_json::from_str::<Value>(data).unwrap()["canopy"].take()).collect()
    }

    /// The parsed chunks before `[DONE]`, which must be there.
    pub fn chunks(&self) -> Vec<Value> {
        let mut events = self.events();
        assert_eq!(events.pop().as_deref(), Some("[DONE]"), "{}", self.text());
        events.iter().map(|event| serde_json::from_str(event).unwrap()).collect()
    }
}

/// Sends one request through the router, without a socket.
pub fn oneshot(state: &AppState, request: Request<Body>) -> Answer {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let response = app(state.clone()).oneshot(request).await.unwrap();
        let status = response.status().as_u16();
        let header = |(name, value): (&axum::http::HeaderName, &axum::http::HeaderValue)| {
            (name.to_string(), value.to_str().unwrap().to_owned())
        };
        let headers = response.headers().iter().map(header).collect();
        let body = axum::body::to_bytes(response.into_body(), usize::MAX).await.unwrap().to_vec();
        Answer { status, headers, body }
    })
}

pub fn get(state: &AppState, path: &str) -> Answer {
    oneshot(state, Request::get(path).body(Body::empty()).unwrap())
}

pub fn post(state: &AppState, path: &str, body: impl Into<Body>) -> Answer {
    let request = Request::post(path).header("content-type", "application/json");
    oneshot(state, request.body(body.into()).unwrap())
}

pub fn post_json(state: &AppState, path: &str, body: &Value) -> Answer {
    post(state, path, body.to_string())
}

/// A good request gets its text: whatever came before has harmed nobody.
pub fn assert_works(state: &AppState) {
    let body = serde_json::json!({"model": MODEL, "prompt": "def f():", "max_tokens": 5});
    let answer = post_json(state, "/v1/completions", &body);
    assert_eq!(answer.status, StatusCode::OK.as_u16(), "{}", answer.text());
    assert_eq!(answer.json()["choices"][0]["text"], toy_text(5));
}

/// A server on a free port, stopped when dropped.
pub struct Server {
    pub address: SocketAddr,
    pub state: AppState,
    pub seen: Seen,
    stop: Option<tokio::sync::oneshot::Sender<()>>,
    thread: Option<std::thread::JoinHandle<std::io::Result<()>>>,
}

impl Server {
    pub fn start(setup: &Setup) -> Self {
        let (state, seen) = toy_state(setup);
        let mut server = Self::over(state);
        server.seen = seen;
        server
    }

    pub fn over(state: AppState) -> Self {
        Self::at("127.0.0.1:0", state)
    }

    pub fn at(address: &str, state: AppState) -> Self {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let listener = runtime.block_on(tokio::net::TcpListener::bind(address)).unwrap();
        let address = listener.local_addr().unwrap();
        let (stop, stopped) = tokio::sync::oneshot::channel();
        let served = state.clone();
        let thread = std::thread::spawn(move || {
            runtime.block_on(serve::serve(listener, served, async {
                let _ = stopped.await;
            }))
        });
        Self { address, state, seen: Seen::default(), stop: Some(stop), thread: Some(thread) }
    }

    /// Asks the server to drain, as a signal would.
    pub fn stop(&mut self) {
        let _ = self.stop.take().unwrap().send(());
    }

    /// Waits for the end of the drain.
    pub fn join(&mut self) {
        self.thread.take().unwrap().join().unwrap().unwrap();
    }

    /// Sends a request and leaves the answer unread. HTTP/1.0: the body is not chunked and ends with the connection.
    pub fn open(&self, method: &str, path: &str, body: &str) -> TcpStream {
        let mut socket = TcpStream::connect(self.address).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let head = format!(
            "{method} {path} HTTP/1.0\r\nhost: test\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        // The server may answer and close before the whole body is sent.
        let _ = socket.write_all((head + body).as_bytes());
        socket
    }

    pub fn request(&self, method: &str, path: &str, body: &str) -> Answer {
        read_answer(self.open(method, path, body))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(stop) = self.stop.take() {
            let _ = stop.send(());
        }
        // A test that has failed may have left something at a gate.
        if let Some(thread) = self.thread.take().filter(|_| !std::thread::panicking()) {
            let _ = thread.join();
        }
    }
}

/// Reads an answer to the connection's end.
pub fn read_answer(mut socket: TcpStream) -> Answer {
    let mut bytes = Vec::new();
    socket.read_to_end(&mut bytes).unwrap();
    let end = bytes.windows(4).position(|window| window == b"\r\n\r\n").expect("a head");
    let head = String::from_utf8(bytes[..end].to_vec()).unwrap();
    let mut lines = head.lines();
    let status = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
    let headers = lines
        .filter_map(|line| line.split_once(": "))
        .map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned()))
        .collect();
    Answer { status, headers, body: bytes[end + 4..].to_vec() }
}

/// The server has so many open connections. A connection is counted until its request and its answer are dropped.
pub fn has_connections(state: &AppState, open: usize) -> bool {
    get(state, "/metrics").text().contains(&format!("canopy_connections {open}\n"))
}

/// Waits until `what` holds; fails after a minute.
pub fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !holds() {
        assert!(Instant::now() < deadline, "{what}: not within a minute");
        std::thread::sleep(Duration::from_millis(2));
    }
}
