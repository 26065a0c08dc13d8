//! The hub: no network, offline mode, and a download from a small server that breaks off in the middle.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use canopy_e2e::Error;
use canopy_e2e::hub::{HubOptions, fetch_with, is_repo_id};
use serde_json::json;

const REPO: &str = "owner/name";
const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

fn message(error: Error) -> String {
    assert!(matches!(error, Error::Hub { .. }), "{error}");
    error.to_string()
}

fn options(endpoint: &str, cache: &Path, offline: bool) -> HubOptions {
    HubOptions { offline, endpoint: Some(endpoint.into()), cache_dir: Some(cache.into()) }
}

#[test]
fn repo_ids() {
    assert!(is_repo_id("Qwen/Qwen3.5-9B"));
    for name in ["embedded", "a/b/c", "/b", "a/", "../x", "a/..", "a b/c", "a/.hidden"] {
        assert!(!is_repo_id(name), "{name}");
    }
}

/// Nothing listens on the port: an error that says what to do, after a few attempts.
#[test]
fn no_network() {
    let endpoint = "http://127.0.0.1:1";
    let cache = tempfile::tempdir().unwrap();
    let start = Instant::now();
    let text = message(fetch_with(REPO, &options(endpoint, cache.path(), false)).unwrap_err());
    assert!(start.elapsed() < Duration::from_secs(60), "{:?}", start.elapsed());
    assert!(text.starts_with(&format!("owner/name: no answer from {endpoint} (")), "{text}");
    assert!(text.contains("--offline") && text.contains("--model DIR"), "{text}");
    let name = fetch_with("no-owner", &options(endpoint, cache.path(), false)).unwrap_err();
    assert_eq!(message(name), "no-owner: expected owner/name");
}

#[test]
fn offline_without_a_copy() {
    let cache = tempfile::tempdir().unwrap();
    let text = message(fetch_with(REPO, &options("http://127.0.0.1:1", cache.path(), true)).unwrap_err());
    assert!(text.contains("expected a complete copy in the cache, got none in"), "{text}");
    assert!(text.contains("models--owner--name") && text.contains("--model DIR"), "{text}");
}

/// A hub with one repository of two files; it stops answering range requests after `bytes_left` bytes.
struct Server {
    endpoint: String,
    state: Arc<State>,
}

struct State {
    files: Vec<(&'static str, Vec<u8>)>,
    bytes_left: AtomicU64,
    sent: AtomicUsize,
    requests: Mutex<Vec<String>>,
}

impl Server {
    fn start(files: Vec<(&'static str, Vec<u8>)>, bytes_left: u64) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let (bytes_left, sent) = (AtomicU64::new(bytes_left), AtomicUsize::new(0));
        let state = Arc::new(State { files, bytes_left, sent, requests: Mutex::default() });
        let shared = state.clone();
        std::thread::spawn(move || {
            for connection in listener.incoming() {
                let state = shared.clone();
                std::thread::spawn(move || state.answer(connection.unwrap()));
            }
        });
        Self { endpoint, state }
    }
}

impl State {
    fn answer(&self, mut connection: TcpStream) -> Option<()> {
        let mut lines = BufReader::new(connection.try_clone().ok()?).lines();
        let request = lines.next()?.ok()?;
        let mut range = None;
        for line in lines.map_while(Result::ok).take_while(|line| !line.is_empty()) {
            if let Some(bytes) = line.to_ascii_lowercase().strip_prefix("range: bytes=") {
                let (start, end) = bytes.split_once('-')?;
                range = Some((start.parse::<usize>().ok()?, end.parse::<usize>().ok()?));
            }
        }
        self.requests.lock().unwrap().push(request.clone());
        let mut words = request.split(' ');
        let (method, path) = (words.next()?, words.next()?.split('?').next()?);
        let api = format!("/api/models/{REPO}");
        if path == api || path.starts_with(&format!("{api}/revision")) {
            let info = json!({"id": REPO, "_id": "1", "sha": COMMIT, "tags": [], "siblings": []});
            return reply(&mut connection, "200 OK", info.to_string().as_bytes(), true);
        }
        if path == format!("{api}/tree/{COMMIT}") {
            let entry = |(path, data): &(&str, Vec<u8>)| json!({"type": "file", "oid": "1", "path": path, "size": data.len()});
            let mut list: Vec<_> = self.files.iter().map(entry).collect();
            list.push(json!({"type": "file", "oid": "1", "path": "README.md", "size": 5}));
            return reply(&mut connection, "200 OK", json!(list).to_string().as_bytes(), true);
        }
        let name = path.strip_prefix(&format!("/{REPO}/resolve/{COMMIT}/"));
        let Some((_, data)) = self.files.iter().find(|(file, _)| Some(*file) == name) else {
            return reply(&mut connection, "404 Not Found", b"{}", true);
        };
        let Some((start, end)) = range.filter(|_| method == "GET") else {
            return reply(&mut connection, "200 OK", data, method == "GET");
        };
        let part = &data[start..=end];
        let left = self.bytes_left.load(Ordering::SeqCst);
        if (part.len() as u64) > left {
            return reply(&mut connection, "503 Service Unavailable", b"", true);
        }
        self.bytes_left.store(left - part.len() as u64, Ordering::SeqCst);
        self.sent.fetch_add(part.len(), Ordering::SeqCst);
        reply(&mut connection, "206 Partial Content", part, true)
    }
}

fn reply(connection: &mut TcpStream, status: &str, body: &[u8], with_body: bool) -> Option<()> {
    let head = format!(
        "HTTP/1.1 {status}\r\ncontent-length: {}\r\netag: \"1\"\r\nx-repo-commit: {COMMIT}\r\nconnection: close\r\n\r\n",
        body.len()
    );
    connection.write_all(head.as_bytes()).ok()?;
    if with_body {
        connection.write_all(body).ok()?;
    }
    Some(())
}

/// The first run ends in the middle of the weights; the second fetches only what is missing; the third nothing;
/// then the copy serves offline and without a network.
#[test]
fn a_broken_download_resumes() {
    const PIECE: usize = 32 << 20;
    let weights: Vec<u8> = (0..PIECE + 1000).map(|i| (i * 31 % 251) as u8).collect();
    let files = vec![("config.json", b"{}".to_vec()), ("model.safetensors", weights.clone())];
    let server = Server::start(files, 2 + PIECE as u64);
    let cache = tempfile::tempdir().unwrap();
    let online = options(&server.endpoint, cache.path(), false);
    let text = message(fetch_with(REPO, &online).unwrap_err());
    assert!(text.contains("no answer from") && text.contains("a download resumes"), "{text}");
    message(fetch_with(REPO, &options(&server.endpoint, cache.path(), true)).unwrap_err());

    server.state.bytes_left.store(u64::MAX, Ordering::SeqCst);
    server.state.sent.store(0, Ordering::SeqCst);
    let dir = fetch_with(REPO, &online).unwrap();
    assert_eq!(server.state.sent.load(Ordering::SeqCst), 1000);
    assert_eq!(std::fs::read(dir.join("model.safetensors")).unwrap(), weights);
    assert!(dir.join("config.json").is_file() && !dir.join("README.md").exists());

    assert_eq!(fetch_with(REPO, &online).unwrap(), dir);
    assert_eq!(server.state.sent.load(Ordering::SeqCst), 1000);
    let asked = server.state.requests.lock().unwrap().iter().any(|request| request.contains("README"));
    assert!(!asked);
    assert_eq!(fetch_with(REPO, &options("http://127.0.0.1:1", cache.path(), true)).unwrap(), dir);
    assert_eq!(fetch_with(REPO, &options("http://127.0.0.1:1", cache.path(), false)).unwrap(), dir);
}

#[test]
fn a_repository_that_is_not_there() {
    let server = Server::start(Vec::new(), 0);
    let cache = tempfile::tempdir().unwrap();
    let text =
        message(fetch_with("owner/other", &options(&server.endpoint, cache.path(), false)).unwrap_err());
    assert!(text.contains("check owner/name, set HF_TOKEN"), "{text}");
    let text = message(fetch_with(REPO, &options(&server.endpoint, cache.path(), false)).unwrap_err());
    assert!(text.contains("expected config.json and safetensors weights in the repository"), "{text}");
}
