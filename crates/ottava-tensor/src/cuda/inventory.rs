//! The report of `ottava doctor` about the CUDA libraries of this machine.

use super::load::LibraryReport;
use super::{cublaslt, cudnn, driver, nccl, nvml, nvrtc};

/// Opens each library and reports the result. It works on a machine without these libraries.
pub fn inventory() -> Vec<LibraryReport> {
    vec![driver::report(), nvrtc::report(), cublaslt::report(), cudnn::report(), nccl::report(), nvml::report()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_inventory_lists_every_library_with_a_path_or_a_problem() {
        let reports = inventory();
        assert_eq!(reports.len(), 6);
        for report in reports {
            assert_eq!(report.path.is_some(), report.problem.is_none(), "{report:?}");
            eprintln!("{report:?}");
        }
    }
}
