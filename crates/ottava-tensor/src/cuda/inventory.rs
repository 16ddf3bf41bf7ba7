//! What `ottava doctor` says about the CUDA libraries of this machine.

use super::load::{LibraryReport, NCCL, Problem, SearchPath, SharedLibrary, dotted, functions};
use super::{cublaslt, cudnn, driver, nvrtc};
use std::sync::OnceLock;

/// Opens each library and reports the result. Works on a machine without any of them.
pub fn inventory() -> Vec<LibraryReport> {
    vec![driver::report(), nvrtc::report(), cublaslt::report(), cudnn::report(), nccl_report()]
}

functions! {
    /// The only NCCL function that the report needs.
    struct NcclVersion {
        get_version = ncclGetVersion(*mut i32) -> i32;
    }
}

fn nccl_report() -> LibraryReport {
    static OPENED: OnceLock<Result<NcclVersion, Problem>> = OnceLock::new();
    let opened =
        OPENED.get_or_init(|| SharedLibrary::open(&NCCL, SearchPath::of_process()).and_then(NcclVersion::load));
    LibraryReport::new(
        &NCCL,
        opened,
        |nccl| &nccl.library,
        |nccl| {
            let mut version = 0;
            // SAFETY: NCCL writes one int.
            let status = unsafe { (nccl.get_version)(&mut version) };
            (status == 0).then(|| dotted(version as usize))
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_inventory_lists_every_library_with_a_path_or_a_problem() {
        let reports = inventory();
        assert_eq!(reports.len(), 5);
        for report in reports {
            assert_eq!(report.path.is_some(), report.problem.is_none(), "{report:?}");
            eprintln!("{report:?}");
        }
    }
}
