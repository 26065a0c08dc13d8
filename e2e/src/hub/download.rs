//! Files by byte ranges, so that an interrupted download goes on where it stopped.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use hf_hub::HFError;
use indicatif::{MultiProgress, ProgressBar, ProgressStyle};

use super::{Hub, Wanted, is_unreachable};
use crate::{Error, Result};

const PIECE: u64 = 32 << 20;
const WORKERS: usize = 4;
/// Waits between attempts at one piece.
const WAITS: [Duration; 3] = [Duration::from_millis(500), Duration::from_secs(1), Duration::from_secs(2)];

/// Puts every wanted file into `dir`. A file under way grows in `<folder>/partial` and moves when it is whole.
pub(super) fn files(hub: &Hub, commit: &str, dir: &Path, wanted: &[Wanted]) -> Result<()> {
    let partial = hub.folder.join("partial");
    for path in [dir, &partial] {
        std::fs::create_dir_all(path).map_err(|cause| Error::Io { path: path.into(), cause })?;
    }
    let missing = wanted.iter().filter(|(name, _)| !dir.join(name).is_file());
    let (queue, failed) = (Mutex::new(missing), AtomicBool::new(false));
    let bars = MultiProgress::new();
    let one = |(name, size): &Wanted| -> Result<()> {
        let part = partial.join(format!("{commit}-{name}"));
        let bar = bars.add(bar(name, *size));
        tracing::info!(repo = hub.name, file = name, bytes = size, "downloading");
        if file(hub, commit, (name, *size), &part, &bar, &failed)? {
            bar.finish();
            std::fs::rename(&part, dir.join(name)).map_err(|cause| Error::Io { path: part, cause })?;
        }
        Ok(())
    };
    let work = || {
        while !failed.load(Ordering::Relaxed) {
            let next = queue.lock().map(|mut queue| queue.next()).unwrap_or(None);
            let Some(wanted) = next else { break };
            one(wanted).inspect_err(|_| failed.store(true, Ordering::Relaxed))?;
        }
        Ok(())
    };
    thread::scope(|scope| {
        let workers: Vec<_> = (0..WORKERS).map(|_| scope.spawn(work)).collect();
        let mut joined = workers.into_iter().map(|worker| worker.join());
        joined.try_for_each(|result| result.unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
    })
}

/// Appends what `part` lacks. False when another file failed and the rest is left for the next run.
fn file(
    hub: &Hub,
    commit: &str,
    (name, size): (&str, u64),
    part: &Path,
    bar: &ProgressBar,
    failed: &AtomicBool,
) -> Result<bool> {
    let io = |cause| Error::Io { path: part.into(), cause };
    let mut out = OpenOptions::new().create(true).append(true).open(part).map_err(io)?;
    lock(hub, &out, name)?;
    let mut have = out.metadata().map_err(io)?.len();
    if have > size {
        out.set_len(0).map_err(io)?;
        have = 0;
    }
    bar.set_position(have);
    while have < size {
        if failed.load(Ordering::Relaxed) {
            return Ok(false);
        }
        let end = size.min(have + PIECE);
        let bytes = piece(hub, commit, name, have..end)?;
        if bytes.len() as u64 != end - have {
            let message = format!("{name}: expected bytes {have}..{end}, got {} bytes", bytes.len());
            return Err(hub.error(message));
        }
        out.write_all(&bytes).map_err(io)?;
        have = end;
        bar.set_position(have);
    }
    out.sync_all().map_err(io)?;
    Ok(true)
}

/// Two processes must not append to one file.
fn lock(hub: &Hub, file: &File, name: &str) -> Result<()> {
    file.try_lock()
        .map_err(|_| hub.error(format!("{name}: another process is downloading it; wait for that one")))
}

fn piece(hub: &Hub, commit: &str, name: &str, range: std::ops::Range<u64>) -> Result<Vec<u8>> {
    let mut waits = WAITS.iter();
    loop {
        let request = hub.repo.download_file_to_bytes().filename(name).revision(commit).range(range.clone());
        let error = match request.send() {
            Ok(bytes) => return Ok(bytes.into()),
            Err(error) => error,
        };
        match waits.next() {
            Some(wait) if may_pass(&error) => thread::sleep(*wait),
            _ if is_unreachable(&error) => return Err(hub.unreachable(&error)),
            _ => return Err(hub.refused(&error)),
        }
    }
}

fn may_pass(error: &HFError) -> bool {
    is_unreachable(error) || matches!(error, HFError::RateLimited { .. } | HFError::Xet { .. })
}

fn bar(name: &str, size: u64) -> ProgressBar {
    const TEMPLATE: &str = "{msg:36!} [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec} {eta}";
    let style = ProgressStyle::with_template(TEMPLATE).unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(size).with_style(style.progress_chars("=> ")).with_message(name.to_owned())
}
