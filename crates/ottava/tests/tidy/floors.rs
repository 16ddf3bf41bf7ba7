//! The floors of the library crates.

/// Floors of the top modules of a crate, or of files in them (`"folder/file"`); the longest match counts.
pub type Floors = &'static [(&'static str, u8)];

/// The library crates, lower crates first. A file may import from its own floor or lower ones.
pub const FLOORS: &[(&str, Floors)] = &[
    (
        "ottava-tensor",
        &[
            ("dtype", 0),
            ("element", 0),
            ("error", 0),
            ("fp8", 0),
            ("granularity", 0),
            ("parts", 0),
            ("cuda", 1),
            ("host_transfer", 1),
            ("device", 1),
            ("tracker", 1),
            ("quantized", 1),
            ("stored", 1),
            ("tensor", 1),
            ("bench", 2),
            ("comm", 2),
            ("ops", 2),
            ("testing", 2),
        ],
    ),
    (
        "ottava-lm",
        &[
            ("error", 3),
            ("hash", 3),
            ("input", 3),
            ("interrupt", 3),
            ("launch", 3),
            ("limits", 3),
            ("mode", 3),
            ("operand", 3),
            ("context", 3),
            ("param", 3),
            ("recipe", 3),
            ("level", 3),
            ("recompute", 3),
            ("scaling", 3),
            ("layers", 4),
            ("models", 5),
            ("checkpoint", 6),
            ("data", 6),
            ("evaluate", 6),
            ("generate", 6),
            ("optim", 6),
            ("parallel", 6),
            ("report", 6),
            ("config", 7),
            ("bench", 7),
            ("plan", 7),
            ("run", 7),
            ("step", 7),
            ("trainer", 7),
        ],
    ),
];
