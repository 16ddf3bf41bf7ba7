//! Why a template cannot be parsed or rendered.

/// Results of this folder.
pub(super) type Result<T, E = Failure> = std::result::Result<T, E>;

/// Why a template cannot be parsed or rendered.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::data) struct Failure {
    pub(super) reason: String,
    /// The line of the template, from 1; 0 until it is known.
    pub(super) line: usize,
}

impl Failure {
    /// The same failure, at `line` if it has none yet.
    pub(super) fn at(self, line: usize) -> Failure {
        Failure { line: if self.line == 0 { line } else { self.line }, ..self }
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter) -> std::fmt::Result {
        match self.line {
            0 => f.write_str(&self.reason),
            line => write!(f, "{} (line {line})", self.reason),
        }
    }
}

/// An error without a line.
pub(super) fn fail<T>(reason: impl Into<String>) -> Result<T> {
    Err(Failure { reason: reason.into(), line: 0 })
}
