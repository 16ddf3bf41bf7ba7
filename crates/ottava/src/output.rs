//! Output: results go to standard output, all other text goes to standard error.
//!
//! Nothing here panics: if a pipe or descriptor is closed, or a disk is full, only the text is lost. A result that cannot be written to standard
//! output makes [`finish`] fail, unless the reader has closed the pipe.

use indicatif::{ProgressBar, ProgressStyle};
use ottava_checkpoint::Saved;
use ottava_common::{Error, Result, interrupt};
use ottava_hub::Watch;
use ottava_train::objective::Validation;
use ottava_train::trainer::StepReport;
use std::borrow::Cow;
use std::cell::Cell;
use std::fmt::{Arguments, Write as _};
use std::fs::File;
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tracing_subscriber::fmt;
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};

/// Prints a line to standard output, as `println!` does, but never panics.
macro_rules! out {
    () => { $crate::output::print(format_args!("\n")) };
    ($($part:tt)*) => { $crate::output::print(format_args!("{}\n", format_args!($($part)*))) };
}

/// Prints to standard output without ending the line.
macro_rules! out_part {
    ($($part:tt)*) => { $crate::output::print(format_args!($($part)*)) };
}

/// Prints a line to standard error, as `eprintln!` does, but never panics.
macro_rules! note {
    ($($part:tt)*) => { $crate::output::complain(format_args!($($part)*)) };
}

/// The first failure to write a result.
static LOST: OnceLock<io::Error> = OnceLock::new();

/// Implements [`out!`].
pub fn print(text: Arguments) {
    let text = text.to_string();
    let mut stdout = io::stdout().lock();
    let text = if stdout.is_terminal() { visible(&text) } else { Cow::from(text) };
    if let Err(error) = stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        let _ = LOST.set(error);
    }
}

/// Prints a line of texts. Marked texts are coloured on a terminal unless `NO_COLOR` is set; otherwise they are in brackets.
pub fn print_marked(parts: &[(&str, bool)]) {
    let colour = io::stdout().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
    let mut line = String::new();
    for &(text, marked) in parts {
        line += &match (marked, colour) {
            (false, _) => visible(text).into_owned(),
            (true, false) => format!("[{}]", visible(text)),
            (true, true) => format!("\u{1b}[32m{}\u{1b}[0m", visible(text)),
        };
    }
    line.push('\n');
    let mut stdout = io::stdout().lock();
    if let Err(error) = stdout.write_all(line.as_bytes()).and_then(|()| stdout.flush()) {
        let _ = LOST.set(error);
    }
}

/// The destination of the messages of a rank other than 0.
struct RankLog {
    rank: usize,
    /// The log file; `None` if standard error is already this file.
    file: Option<File>,
}

static LOG: OnceLock<RankLog> = OnceLock::new();

/// From now on, writes messages to the log `file` of a rank, or to standard error if `file` is `None`. Each line begins with the time.
pub fn log_to(rank: usize, file: Option<File>) {
    let _ = LOG.set(RankLog { rank, file });
}

/// Prints the last message of the process to the log of its rank and to standard error.
pub fn last_words(text: &str) {
    note!("{text}");
    if let Some(RankLog { rank, file: Some(_) }) = LOG.get() {
        let _ = io::stderr().lock().write_all(format!("rank {rank}: {}\n", visible(text)).as_bytes());
    }
}

/// Implements [`note!`].
pub fn complain(text: Arguments) {
    let _ = Stderr.write_all(format!("{}\n", visible(&text.to_string())).as_bytes());
}

/// Errors if a result could not be written, unless the reader has closed the pipe (`| head -1`).
pub fn finish() -> Result<()> {
    match LOST.get() {
        Some(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(Error::io("standard output")(io::Error::new(error.kind(), error.to_string())))
        }
        _ => Ok(()),
    }
}

/// Escapes the control characters of `text`, so that names and generated text cannot control a terminal.
fn visible(text: &str) -> Cow<'_, str> {
    let steers = |c: char| c.is_control() && !matches!(c, '\n' | '\t');
    if !text.contains(steers) {
        return Cow::from(text);
    }
    let mut visible = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if steers(c) {
            write!(visible, "\\u{{{:x}}}", u32::from(c)).expect("strings take all that is written");
        } else {
            visible.push(c);
        }
    }
    Cow::from(visible)
}

/// A writer to standard error or to the log of a rank. Failed writes are ignored. Each write is one message.
struct Stderr;

impl Write for Stderr {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let Some(log) = LOG.get() else {
            let _ = io::stderr().lock().write_all(bytes);
            return Ok(bytes.len());
        };
        let mut line = String::new();
        let _ = SystemTime.format_time(&mut fmt::format::Writer::new(&mut line));
        let line = [line.as_bytes(), b" ", bytes].concat();
        let _ = match &log.file {
            Some(file) => (&*file).write_all(&line),
            None => io::stderr().lock().write_all(&line),
        };
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Logs to standard error, without time and target. `RUST_LOG` sets the level.
pub fn log_to_stderr() {
    let filter = tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "info".into());
    fmt()
        .with_env_filter(filter)
        .with_writer(|| Stderr)
        .without_time()
        .with_target(false)
        .with_ansi(io::stderr().is_terminal())
        .init();
}

/// Prints `value` as one JSON object on one line.
pub fn print_json(value: &impl serde::Serialize) {
    out!("{}", serde_json::to_string(value).expect("results are written without fail"));
}

/// Handles the first SIGINT, SIGTERM or SIGHUP: prints `message` and requests a stop of all ranks. A second signal ends the process.
pub fn stop_on_signals(message: &'static str) -> Result<()> {
    let handled = AtomicBool::new(false);
    handle_signals(move || {
        if handled.swap(true, Ordering::Relaxed) {
            std::process::exit(130);
        }
        interrupt::request();
        note!("{message} (a second signal stops at once)");
    })
}

/// Handles SIGINT, SIGTERM and SIGHUP by a request to stop. If a second signal arrives before the request is reset, it ends the process.
pub fn stop_answers_on_signals() -> Result<()> {
    handle_signals(|| {
        if interrupt::flag().swap(true, Ordering::Relaxed) {
            std::process::exit(130);
        }
    })
}

/// Ignores SIGINT, SIGTERM and SIGHUP. Used by ranks that end when rank 0 ends.
pub fn ignore_signals() -> Result<()> {
    handle_signals(|| {})
}

/// Handles SIGINT, SIGTERM and SIGHUP by a request to stop this rank and, once it has joined them, the other ranks.
pub fn forward_signals() -> Result<()> {
    handle_signals(interrupt::request)
}

fn handle_signals(handle: impl FnMut() + Send + 'static) -> Result<()> {
    ctrlc::set_handler(handle).map_err(|e| Error::Config(format!("signals cannot be handled here: {e}")))
}

/// The progress of training: a bar on a terminal, else lines.
pub struct Progress {
    bar: Option<ProgressBar>,
    logging_steps: u64,
    /// The time after the first step of this process, and the number of this step.
    first: Cell<Option<(Instant, u64)>>,
}

impl Progress {
    /// Creates the progress, which prints a line after the first step, and then every `logging_steps` steps.
    pub fn new(logging_steps: u64) -> Progress {
        let bar = (io::stderr().is_terminal() && LOG.get().is_none()).then(|| {
            let style = ProgressStyle::with_template("{bar:12} {pos}/{len} [{elapsed}<{eta}] {wide_msg}");
            ProgressBar::new(0).with_style(style.expect("the template is valid"))
        });
        Progress { bar, logging_steps, first: Cell::new(None) }
    }

    /// Shows one step.
    pub fn step(&self, report: &StepReport) {
        let mut line = format!(
            "loss {:.4}  lr {:.2e}  grad norm {:.3}  {:.0} tokens/s",
            report.result.loss, report.learning_rate, report.result.grad_norm, report.cost.tokens_per_second
        );
        if !report.metrics.words.is_empty() {
            line += &format!("  {}", report.metrics.words);
        }
        if let Some(casts) = &report.casts {
            line += &format!("  fp8 saturated {:.1e} underflowed {:.1e}", casts.saturated, casts.underflowed);
        }
        let (step, max_steps, first) = (report.step, report.max_steps, self.first.get());
        match &self.bar {
            Some(bar) => {
                bar.set_length(max_steps);
                bar.set_position(step);
                bar.set_message(line);
            }
            None if first.is_none() || step.is_multiple_of(self.logging_steps) || step == max_steps => {
                let time = first.map(|(begin, first)| times(begin.elapsed(), step - first.min(step), max_steps - step));
                note!("step {step}/{max_steps}  {line}{}", time.unwrap_or_default());
            }
            None => {}
        }
        if first.is_none() {
            self.first.set(Some((Instant::now(), step)));
        }
        if let Some(Validation { all, sets, tasks, .. }) = &report.evaluation {
            let of_all = all.iter().map(|all| (String::new(), all));
            let of_sets = sets.iter().map(|(name, evaluation)| (format!("  {name}:"), evaluation));
            for (name, evaluation) in of_all.chain(of_sets) {
                let (step, words) = (report.step, &evaluation.metrics.words);
                self.line(&format!("step {step}{name}  validation loss {:.4}  {words}", evaluation.loss));
            }
            for (name, metrics) in tasks {
                let words: Vec<_> =
                    metrics.iter().map(|metric| format!("{} {:.4}", metric.name, metric.value)).collect();
                self.line(&format!("step {}  {name}: {}", report.step, words.join("  ")));
            }
        }
        for Saved { step, path, paused, took } in &report.saved {
            let [paused, took] = [paused, took].map(|time| time.as_secs_f64());
            self.line(&format!(
                "step {step}  saved {} in {took:.2} s; training was paused for {paused:.2} s",
                path.display()
            ));
        }
    }

    /// Prints a line; if there is a bar, above the bar.
    pub fn line(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.println(visible(text)),
            None => note!("{text}"),
        }
    }

    /// Ends the progress bar.
    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.abandon();
        }
    }
}

/// Returns the time that `done` steps took, and the time that the steps that are `left` will take at this speed.
fn times(elapsed: Duration, done: u64, left: u64) -> String {
    let clock = |time: Duration| {
        let seconds = time.as_secs();
        match seconds / 3600 {
            0 => format!("{}:{:02}", seconds / 60, seconds % 60),
            hours => format!("{hours}:{:02}:{:02}", seconds / 60 % 60, seconds % 60),
        }
    };
    let remaining = elapsed.as_secs_f64() / done.max(1) as f64 * left as f64;
    match Duration::try_from_secs_f64(remaining) {
        Ok(remaining) if left > 0 && done > 0 => format!("  [{}<{}]", clock(elapsed), clock(remaining)),
        _ => format!("  [{}]", clock(elapsed)),
    }
}

/// Shows the tokens per second of a pass over a text. A terminal shows a progress bar; elsewhere, a line is printed every [`PAUSE`] and one at the
/// end.
pub struct Meter {
    bar: Option<ProgressBar>,
    /// The activity, such as "evaluated".
    done: &'static str,
    total: u64,
    begin: Instant,
    /// The time when the last line was printed.
    told: Instant,
}

/// The time between lines of progress.
const PAUSE: Duration = Duration::from_secs(10);

impl Meter {
    /// Starts the time, for a pass over `total` tokens.
    pub fn new(done: &'static str, total: u64) -> Meter {
        let bar = io::stderr().is_terminal().then(|| {
            let style = ProgressStyle::with_template("{bar:30} {pos}/{len} tokens [{elapsed}<{eta}] {per_sec}");
            ProgressBar::new(total).with_style(style.expect("the template is valid"))
        });
        Meter { bar, done, total, begin: Instant::now(), told: Instant::now() }
    }

    /// Shows that `tokens` tokens are done.
    pub fn at(&mut self, tokens: u64) {
        match &self.bar {
            Some(bar) => bar.set_position(tokens),
            None if self.told.elapsed() >= PAUSE && tokens < self.total => {
                self.told = Instant::now();
                note!("{} {tokens} of {} tokens, {}", self.done, self.total, self.speed(tokens));
            }
            None => {}
        }
    }

    /// Prints the time that `tokens` tokens took.
    pub fn finish(self, tokens: u64) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        note!("{} {tokens} tokens in {:.1} s, {}", self.done, self.begin.elapsed().as_secs_f64(), self.speed(tokens));
    }

    fn speed(&self, tokens: u64) -> String {
        format!("{:.1} tokens/s", tokens as f64 / self.begin.elapsed().as_secs_f64())
    }
}

/// The progress of a download or an upload. A terminal shows a bar; elsewhere, a line is printed every [`PAUSE`] and one at the end.
pub struct Transfer {
    bar: Option<ProgressBar>,
    /// The activity, such as "downloaded".
    done: &'static str,
    begin: Instant,
    told: Instant,
}

impl Transfer {
    /// Creates the progress of a transfer.
    pub fn new(done: &'static str) -> Transfer {
        let bar = (io::stderr().is_terminal() && LOG.get().is_none()).then(|| {
            let style = "{msg} {bar:30} {bytes}/{total_bytes} [{elapsed}<{eta}] {bytes_per_sec}";
            ProgressBar::new(0).with_style(ProgressStyle::with_template(style).expect("the template is valid"))
        });
        Transfer { bar, done, begin: Instant::now(), told: Instant::now() }
    }
}

impl Watch for Transfer {
    fn at(&mut self, what: &str, done: u64, total: u64) {
        let mib = |bytes: u64| bytes as f64 / (1 << 20) as f64;
        if done >= total {
            if let Some(bar) = &self.bar {
                bar.finish_and_clear();
            }
            let seconds = self.begin.elapsed().as_secs_f64();
            note!("{what}: {} {:.1} MiB in {seconds:.1} s", self.done, mib(total));
        } else if let Some(bar) = &self.bar {
            bar.set_message(visible(what).into_owned());
            bar.set_length(total);
            bar.set_position(done);
        } else if self.told.elapsed() >= PAUSE {
            self.told = Instant::now();
            note!("{what}: {} {:.1} of {:.1} MiB", self.done, mib(done), mib(total));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_that_is_left_follows_from_the_speed() {
        assert_eq!(times(Duration::from_secs(90), 9, 360), "  [1:30<1:00:00]");
        assert_eq!(times(Duration::from_secs(3661), 10, 0), "  [1:01:01]");
        assert_eq!(times(Duration::from_secs(5), 0, 10), "  [0:05]");
    }

    #[test]
    fn control_characters_do_not_reach_a_terminal() {
        assert_eq!(visible("plain, Ω\tand\nlines"), "plain, Ω\tand\nlines");
        assert_eq!(visible("a\u{1b}[2Jb\r\u{7f}\u{9b}"), "a\\u{1b}[2Jb\\u{d}\\u{7f}\\u{9b}");
    }
}
