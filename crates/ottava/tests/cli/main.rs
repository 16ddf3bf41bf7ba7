//! The program as a user meets it: commands, results, and what bad input gets.

mod bad_input;
mod commands;
mod hostile;
mod inspect;
mod kill;
mod runs;
mod setup;
mod signals;
mod streams;
