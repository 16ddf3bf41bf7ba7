//! Why a template cannot be parsed or rendered.

/// Results of this folder.
pub(crate) type Result<T, E = Failure> = std::result::Result<T, E>;

/// Why a template cannot be parsed or rendered.
#[derive(Clone, Debug, PartialEq)]
pub struct Failure {
    pub(crate) reason: String,
    /// The line of the template, from 1; 0 until it is known.
    pub(crate) line: usize,
}

impl Failure {
    /// The same failure, at `line` if it has none yet.
    pub(crate) fn at(self, line: usize) -> Failure {
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
pub(crate) fn fail<T>(reason: impl Into<String>) -> Result<T> {
    Err(Failure { reason: reason.into(), line: 0 })
}
