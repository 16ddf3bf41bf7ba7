//! Lines of pipes, with bounds on their length and number, read and written by threads.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read, Write};
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;

/// Lines that wait to be read. The thread of a program that writes more waits, and so does the program.
const WAITING: usize = 16;

/// The most bytes of a line that is kept for errors.
const MAX_KEPT_LINE: u64 = 1024;

/// The most lines that are kept for errors.
const MAX_KEPT_LINES: usize = 20;

/// What was read.
pub(super) enum Line {
    /// A line without its end.
    Whole(Vec<u8>),
    /// More than the most bytes without a line end. Nothing after it is read.
    TooLong,
    /// This many bytes without a line end, and the end of the pipe.
    Cut(usize),
}

/// Reads lines of at most `most` bytes.
pub(super) fn read(pipe: impl Read + Send + 'static, most: usize) -> Receiver<Line> {
    let (sender, lines) = sync_channel(WAITING);
    thread::spawn(move || send_lines(pipe, most, &sender));
    lines
}

fn send_lines(pipe: impl Read, most: usize, to: &SyncSender<Line>) {
    let mut reader = BufReader::new(pipe);
    loop {
        let mut line = Vec::new();
        // One byte more than a line and its end tells that a line is too long. A pipe that fails is a pipe that ends.
        let length = reader.by_ref().take(most as u64 + 2).read_until(b'\n', &mut line).unwrap_or(0);
        let line = match line.pop_if(|last| *last == b'\n') {
            Some(_) => Line::Whole(line),
            None if length > most => Line::TooLong,
            None if length > 0 => Line::Cut(length),
            None => return,
        };
        let is_last = !matches!(line, Line::Whole(_));
        if to.send(line).is_err() || is_last {
            return;
        }
    }
}

/// Writes what is sent, until the sender is dropped or the pipe closes. Then the pipe is closed.
pub(super) fn write(mut pipe: impl Write + Send + 'static) -> Sender<Vec<u8>> {
    let (sender, texts) = channel::<Vec<u8>>();
    thread::spawn(move || texts.iter().try_for_each(|text| pipe.write_all(&text)));
    sender
}

/// The last lines of a pipe.
#[derive(Clone, Default)]
pub(super) struct Tail(Arc<Mutex<VecDeque<String>>>);

impl Tail {
    /// Keeps the last lines of `pipe`, and logs each with `name`. The receiver is closed when the pipe ends.
    pub(super) fn follow(name: &str, pipe: impl Read + Send + 'static) -> (Tail, Receiver<()>) {
        let (tail, name) = (Tail::default(), name.to_string());
        let ((sender, end), own) = (channel(), tail.clone());
        thread::spawn(move || {
            let _sender = sender;
            let mut reader = BufReader::new(pipe);
            let mut line = Vec::new();
            while reader.by_ref().take(MAX_KEPT_LINE).read_until(b'\n', &mut line).is_ok_and(|length| length > 0) {
                own.keep(&name, String::from_utf8_lossy(&line).trim_end());
                line.clear();
            }
        });
        (tail, end)
    }

    fn keep(&self, name: &str, line: &str) {
        tracing::info!("{name}: {line}");
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if lines.len() == MAX_KEPT_LINES {
            lines.pop_front();
        }
        lines.push_back(line.to_string());
    }

    /// The lines.
    pub(super) fn text(&self) -> String {
        let lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        lines.iter().map(String::as_str).collect::<Vec<_>>().join("\n")
    }
}
