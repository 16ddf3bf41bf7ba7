//! The program as users run it: commands, results, and errors on bad input.

mod bad_input;
mod chat;
mod commands;
mod exceptions;
mod export;
mod hostile;
mod inspect;
mod kill;
mod ranks;
mod runs;
mod setup;
mod signals;
mod streams;
