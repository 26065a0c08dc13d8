//! The built binary as a process: start-up errors, signals, a full disk behind the log, kill -9.

use std::fs;
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use serde_json::{Value, json};

use crate::support::*;

/// Where nothing else listens, so that nothing takes the port of a server that has ended. Linux has the whole network of
/// 127.0.0.1.
const OWN_HOST: &str = if cfg!(target_os = "linux") { "127.0.0.2" } else { "127.0.0.1" };

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_canopy-server"));
    if !args.contains(&"--port") {
        command.args(["--port", "0"]);
    }
    command.args(["--threads", "1"]).args(args);
    command.env_clear().stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
    command
}

/// A running server.
struct Process {
    child: Child,
    address: SocketAddr,
}

impl Process {
    fn start(mut command: Command) -> Self {
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().rsplit('/').next().unwrap().parse();
        Self { child, address: address.unwrap_or_else(|_| panic!("no address in {line:?}")) }
    }

    fn signal(&self, name: &str) {
        let pid = self.child.id().to_string();
        assert!(Command::new("kill").args([name, &pid]).status().unwrap().success());
    }

    fn open(&self, path: &str, body: &Value) -> TcpStream {
        let body = body.to_string();
        let mut socket = TcpStream::connect(self.address).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        let head = format!(
            "POST {path} HTTP/1.0\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
            body.len()
        );
        socket.write_all((head + &body).as_bytes()).unwrap();
        socket
    }

    fn get(&self, path: &str) -> Answer {
        let mut socket = TcpStream::connect(self.address).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
        socket.write_all(format!("GET {path} HTTP/1.0\r\n\r\n").as_bytes()).unwrap();
        read_answer(socket)
    }

    fn complete(&self, body: &Value) -> Answer {
        read_answer(self.open("/v1/completions", body))
    }

    /// A stream of so many long answers, one token a round, that has begun.
    fn streaming(&self, answers: usize) -> TcpStream {
        let mut socket = self.open(
            "/v1/completions",
            &json!({"prompt": "def f", "max_tokens": 1900, "n": answers, "ignore_eos": true, "draft": false, "stream": true}),
        );
        socket.read_exact(&mut [0; 300]).unwrap();
        socket
    }

    fn wait(&mut self) -> ExitStatus {
        eventually("the process has ended", || self.child.try_wait().unwrap().is_some());
        self.child.wait().unwrap()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs a command that cannot start; gives the exit code and the last line of stderr.
fn refused(args: &[&str]) -> (i32, String) {
    let mut command = command(args);
    if !args.contains(&"--log") {
        command.args(["--log", "off"]);
    }
    let output = command.stderr(Stdio::piped()).output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(output.stdout.is_empty(), "a server that cannot start announces nothing");
    assert!(!text.contains("panicked"), "{text}");
    (output.status.code().unwrap(), text.trim_end().to_owned())
}

/// As printed but for the port.
#[test]
fn the_examples_of_help_work() {
    let binary = Path::new(env!("CARGO_BIN_EXE_canopy-server"));
    let help = Command::new(binary).arg("--help").output().unwrap();
    let help = String::from_utf8(help.stdout).unwrap();
    let (_, examples) = help.split_once("Examples:\n").unwrap();
    let lines = examples.lines().filter_map(|line| line.strip_prefix("  "));
    let (requests, servers): (Vec<&str>, Vec<&str>) = lines.partition(|line| line.starts_with("curl "));
    assert!(servers.len() == 3 && requests.len() == 2, "{examples}");
    let paths = [binary.parent().unwrap().to_str().unwrap(), &std::env::var("PATH").unwrap()].join(":");
    for line in servers {
        let mut shell = Command::new("sh");
        shell.args(["-c", &format!("exec env {line}")]);
        shell.env_clear().env("PATH", &paths).env("CANOPY_PORT", "0").env("CANOPY_THREADS", "1");
        shell.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::null());
        let process = Process::start(shell);
        if line.contains("--api-key") {
            continue;
        }
        for request in &requests {
            let request = request.replace("127.0.0.1:8080", &process.address.to_string());
            let answer = Command::new("sh").args(["-c", &request]).output().unwrap();
            let answer = String::from_utf8(answer.stdout).unwrap();
            assert!(answer.contains("\"choices\":[{"), "{line}, {request}: {answer}");
        }
    }
}

#[test]
fn what_cannot_start_says_why_in_one_sentence() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("canopy.toml");
    fs::write(&file, "slots = 0\n").unwrap();
    let file = file.to_str().unwrap();
    let empty = folder.path().to_str().unwrap();
    for (args, parts) in [
        (&["--port", &port][..], ["cannot listen on", "in use"]),
        (&["--config", file], ["--slots", "got 0"]),
        (&["--config", "no/such.toml"], ["no/such.toml", "No such file"]),
        (&["--model", "no/such/model"], ["--model", "no/such/model"]),
        (&["--model", empty], ["cannot load the model", "config.json"]),
        (&["--device", "tpu"], ["cannot load the model", "tpu"]),
        (&["--log", "canopy=loudest"], ["--log", "level filter"]),
        (&["--api-key-file", "no/such/keys"], ["--api-key-file", "no/such/keys"]),
    ] {
        let (code, text) = refused(args);
        assert_eq!((code, text.lines().count()), (1, 1), "{args:?}: {text}");
        assert!(parts.iter().all(|part| text.contains(part)), "{args:?}: {text}");
    }
    let (code, text) = refused(&["--slots", "many"]);
    assert!(code == 2 && text.contains("--slots"), "{text}");
}

fn copy_of_the_target(to: &Path) {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("../e2e/models/canopy-tiny/target");
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

#[test]
fn broken_weights_are_found_before_the_server_is_ready() {
    let folder = tempfile::tempdir().unwrap();
    copy_of_the_target(folder.path());
    let model = folder.path().to_str().unwrap();
    let shard = folder.path().join("model-00001-of-00002.safetensors");
    let whole = fs::read(&shard).unwrap();

    fs::write(&shard, &whole[..whole.len() / 2]).unwrap();
    let (code, text) = refused(&["--model", model]);
    assert!(code == 1 && text.contains("model-00001-of-00002.safetensors"), "truncated: {text}");

    let mut scrambled = whole.clone();
    scrambled[..64].fill(b'x');
    fs::write(&shard, &scrambled).unwrap();
    let (code, text) = refused(&["--model", model]);
    assert!(code == 1 && text.contains("model-00001-of-00002.safetensors"), "head: {text}");

    // Whole and well-formed, but every number of the shard is NaN: only generating finds it.
    let head = 8 + usize::try_from(u64::from_le_bytes(whole[..8].try_into().unwrap())).unwrap();
    let mut broken = whole;
    broken[head..].fill(0xff);
    fs::write(&shard, &broken).unwrap();
    let (code, text) = refused(&["--model", model]);
    assert!(code == 1 && text.contains("non-finite"), "NaN: {text}");
    assert_eq!(text.lines().count(), 1, "{text}");
}

#[test]
fn a_signal_drains_and_exits_with_0_and_a_second_one_exits_at_once() {
    for name in ["-TERM", "-INT"] {
        let mut server = Process::start(command(&["--drain-timeout", "600"]));
        let mut stream = server.streaming(1);
        server.signal(name);
        let mut rest = String::new();
        stream.read_to_string(&mut rest).unwrap();
        assert!(rest.trim_end().ends_with("data: [DONE]"), "{name}: the running stream finishes");
        assert_eq!(server.wait().code(), Some(0), "{name}");
    }
    let mut server = Process::start(command(&["--drain-timeout", "600"]));
    // Thousands of rounds are left when the second signal comes.
    let _stream = server.streaming(16);
    server.signal("-TERM");
    // A request before that would be admitted, and wait for all of them.
    eventually("the server drains", || server.get("/ready").status == 503);
    assert_eq!(server.complete(&json!({"prompt": "x", "max_tokens": 1})).status, 503);
    server.signal("-TERM");
    assert_eq!(server.wait().code(), Some(130));
}

#[test]
fn kill_9_in_mid_stream_leaves_nothing_that_a_restart_minds() {
    let body = json!({"prompt": "def add(a, b):", "max_tokens": 16});
    let mut server = Process::start(command(&["--host", OWN_HOST]));
    let text = server.complete(&body).json()["choices"][0]["text"].clone();
    let port = server.address.port().to_string();
    let mut stream = server.streaming(16);
    server.signal("-KILL");
    assert_eq!(server.wait().code(), None);
    let mut rest = Vec::new();
    // The peer sees its stream end without the last event, or a reset.
    let _ = stream.read_to_end(&mut rest);
    assert!(!String::from_utf8_lossy(&rest).contains("[DONE]"));
    let again = Process::start(command(&["--host", OWN_HOST, "--port", &port]));
    assert_eq!(again.address.port().to_string(), port, "the port is free at once");
    assert_eq!(again.complete(&body).json()["choices"][0]["text"], text);
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_behind_the_log_loses_log_lines_only() {
    let mut command = command(&["--log", "debug", "--log-format", "json"]);
    command.stderr(fs::OpenOptions::new().write(true).open("/dev/full").unwrap());
    let mut server = Process::start(command);
    for _ in 0..3 {
        assert_eq!(server.complete(&json!({"prompt": "x", "max_tokens": 3})).status, 200);
    }
    server.signal("-TERM");
    assert_eq!(server.wait().code(), Some(0));
}

#[test]
fn log_lines_are_json_with_the_request_id_and_no_key() {
    let mut command = command(&["--log-format", "json", "--api-key", "Sesame"]);
    let mut server = Process::start({
        command.stderr(Stdio::piped());
        command
    });
    let mut socket = TcpStream::connect(server.address).unwrap();
    let body = r#"{"prompt": "x", "max_tokens": 1}"#;
    let head = "POST /v1/completions HTTP/1.0\r\ncontent-type: application/json\r\nauthorization: bearer Sesame\r\n\
                x-request-id: mine-7";
    let request = format!("{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    socket.write_all(request.as_bytes()).unwrap();
    let answer = read_answer(socket);
    assert_eq!((answer.status, answer.header("x-request-id")), (200, Some("mine-7")), "{}", answer.text());
    server.signal("-TERM");
    server.wait();
    let mut log = String::new();
    server.child.stderr.take().unwrap().read_to_string(&mut log).unwrap();
    assert!(!log.contains("Sesame"), "{log}");
    let lines: Vec<Value> = log.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let answered = lines.iter().find(|line| line["message"] == "answered").unwrap();
    assert_eq!((&answered["status"], &answered["span"]["request_id"]), (&json!(200), &json!("mine-7")));
}
