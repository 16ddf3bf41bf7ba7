//! Why a template cannot be parsed or rendered.

/// The results of this crate.
pub(crate) type Result<T, E = Failure> = std::result::Result<T, E>;

/// The reason why a template cannot be parsed or rendered.
#[derive(Clone, Debug, PartialEq)]
pub struct Failure {
    pub(crate) reason: String,
    /// The line of the template, from 1; 0 until it is known.
    pub(crate) line: usize,
}

impl Failure {
    /// Sets the line of the failure, unless it has a line already.
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

/// Returns an error without a line.
pub(crate) fn fail<T>(reason: impl Into<String>) -> Result<T> {
    Err(Failure { reason: reason.into(), line: 0 })
}
